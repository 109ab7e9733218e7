"""`tapeline plan`: what its verbs print, from which inputs, without torch, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tapeline import cli


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """Run one verb of `tapeline plan` in a folder of its own; returns exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tapeline", "plan", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def answer(plan):
    """The JSON document of one verb."""

    def run(*arguments: object) -> dict:
        code, out, err = plan(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_checkpoint_by_default_is_the_scenario_of_the_books(answer):
    found = answer("checkpoint")
    assert found["inputs"]["mtbf_hours"] == {"value": 6.0, "source": "default", "detail": ""}
    expected = [(180, 2788.5, 0.162), (22.5, 985.9, 0.079), (2.25, 311.8, 0.048)]
    for one, (blocking_s, interval_s, overhead) in zip(
        found["model"]["strategies"], expected, strict=True
    ):
        assert one["blocking_s"] == pytest.approx(blocking_s)
        assert one["interval_s"] == pytest.approx(interval_s, abs=0.05)
        assert one["overhead"] == pytest.approx(overhead, abs=5e-4)
    assert found["model"]["best"] == "8 shards, asynchronous"


def test_checkpoint_prints_inputs_with_their_source_and_names_the_model(plan):
    code, out, err = plan("checkpoint", "--mtbf-hours", "12")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["mtbf_hours", "12", "given"] in rows
    assert ["checkpoint_seconds", "180", "default"] in rows
    assert "Model, first order (Young 1974)" in out


def test_checkpoint_draws_its_figure(plan, tmp_path):
    code, _, err = plan("checkpoint", "--plot", "interval")
    assert (code, err) == (0, "figure: interval.svg, interval.png\n")
    assert "mathdefault" not in (tmp_path / "interval.svg").read_text()


def test_a_number_out_of_range_is_refused_in_the_words_of_the_command_line(plan):
    assert plan("checkpoint", "--mtbf-hours", "-1") == (
        2,
        "",
        "tapeline: --mtbf-hours: expected a number above 0 and finite, found -1. Correct it: mean "
        "hours between failures that end the job.\n",
    )


def test_no_plan_imports_torch(tmp_path):
    code = (
        "import sys; sys.argv = ['tapeline', 'plan', 'checkpoint', '--plot', sys.argv[1]]\n"
        "from tapeline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "figure"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
