"""The demo and the tutorial, whole: what they promise is what they print."""

from __future__ import annotations

import json
import subprocess

import pytest

from tapeline.errors import RunError
from tapeline.prove import killing
from tapeline.tape import demo_tape
from tapeline.tours import run_demo


def tapeline(*arguments, cwd, environment):
    done = subprocess.run(
        ["tapeline", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.demo_tape
@pytest.mark.timeout(300)
@pytest.mark.skipif(demo_tape() is None, reason="the data package of the demo extra is missing")
def test_the_demo_on_the_real_tape(tmp_path, warm):
    found, talk = tapeline("demo", "--json", cwd=tmp_path, environment=warm)
    assert found["bitwise_equal"] is True
    assert len(set(found["state_sha256"].values())) == 1
    assert found["killed"]["signal"] == "SIGKILL"
    assert 50 < found["killed"]["after_step"] < 400
    assert found["resumed_from_step"] <= found["killed"]["after_step"]
    tape = found["tape"]
    assert (tape["sessions"], tape["rows"]) == (1, 3595)
    assert 78_318 <= tape["mid_lowest"] < tape["mid_highest"] <= 78_502
    assert tape["windows"] >= 3400
    assert len(tape["report"]["evicted"]) == 2
    assert tape["report"]["rows_held"] + tape["report"]["rows_marked"] == 70
    assert json.loads((tmp_path / "demo" / "demo.json").read_text()) == found
    page = (tmp_path / "demo" / "report.html").read_text()
    assert found["state_sha256"]["uninterrupted"] in page
    assert "3/6 training, until SIGKILL at step" in talk
    lives = (tmp_path / "demo" / "runs" / "killed" / "attempts.jsonl").read_text()
    assert '"how":"killed"' in lives


def test_a_demo_writes_over_a_demo_only(tmp_path):
    """`runs/` is where `tapeline train` puts things too: names alone prove nothing."""
    precious = tmp_path / "runs" / "mine" / "run.json"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    with pytest.raises(RunError) as caught:
        run_demo(tmp_path, None, print)
    assert str(caught.value) == (
        f"{tmp_path}: expected a new folder, or that of an earlier demo, found files that no demo "
        "wrote. Give another folder with --out."
    )
    assert precious.read_text() == "precious"


@pytest.mark.timeout(300)
def test_the_tutorial(tmp_path, warm):
    found, _ = tapeline("tutorial", "--json", cwd=tmp_path, environment=warm)
    sizes = found["sizes"]
    values = 8 * 1140 * 41 * 4
    assert sizes["bytes"]["mmap"] == values
    assert sizes["bytes"]["npy"] == values + 8 * 128
    assert sizes["bytes"]["csv"] > values
    assert sizes["formats_identical"] is True
    assert sizes["windows_per_session"] == 1111
    assert found["exactness"]["accumulation_deviation"] <= 1e-6
    assert found["exactness"]["data_parallel_deviation"] <= 1e-7
    assert found["exactness"]["half_batch_deviation"] > 1e-4
    assert found["resume"]["bitwise_equal"] is True
    assert found["resume"]["resumed_from_step"] == 100
    assert found["resume"]["weights_only_deviation"] > 0
    assert found["precision"]["largest_step_difference"] > 0
    assert set(found["precision"]["last_50_mean"]) == {"float32", "bfloat16"}
    for judged in found["precision"]["out_of_sample"].values():
        assert judged["mse"] < judged["mse_zero"]
    assert found["instruments"] == {
        "instruments": ["SYN", "SYN2"],
        "windows_examined": 8 * 1111,
        "windows_mixing": 0,
        "row_ranges_that_would_mix": 7 * 29,
    }
    assert json.loads((tmp_path / "tutorial" / "tutorial.json").read_text()) == found
    for name in found["figures"]:
        assert (tmp_path / name).stat().st_size > 1000


def test_a_run_that_ends_before_the_kill_is_told(tmp_path):
    (tmp_path / "broken.toml").write_text("[data]\nstore = 'nowhere'\n")
    with pytest.raises(RunError, match=r"found one that ended by itself: tapeline: .*no store"):
        killing.train_and_kill(tmp_path / "broken.toml", tmp_path / "run", at_step=1)
    with pytest.raises(RunError, match=r"expected exit code 0, found 2: tapeline: .*no store"):
        killing.train_to_end(tmp_path / "broken.toml", tmp_path / "run")
