"""A run for TensorBoard: a folder with one file of events, written anew by each export.

Metrics are scalars by step at the time they were measured, settings are hyperparameters and text,
findings are text at their step. Nothing of torch or TensorFlow is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.hparams.metadata import (
    PLUGIN_DATA_VERSION,
    PLUGIN_NAME,
    SESSION_START_INFO_TAG,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tapeline.errors import ExportError
from tapeline.export.tracking import Progress, Sent
from tapeline.ledger.phases import NS_PER_S
from tapeline.runs.view import RunView

_EVENTS = "events.out.tfevents.*"
_TOLD_EVERY = 1000


class TensorBoard:
    """Writes a run to a folder; what an earlier export of it wrote there is replaced.

    Args:
        folder: for this run alone; made if it isn't there.
        run_id: in the names of its files.

    Raises:
        ExportError: there are other events in the folder.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.where = str(folder)
        self._folder = folder
        self._suffix = f".{run_id}"
        others = [path for path in folder.glob(_EVENTS) if path.suffix != self._suffix]
        if others:
            raise ExportError(
                folder,
                expected="a folder of this run's own",
                found=f"events of another, {others[0].name}",
                fix="Give a new folder with --out; all below one are shown together",
            )
        self._writer: Any = None
        self._sent = Sent()
        self._told: set[int] = set()  # findings, by their place
        self._step = 0
        self._state = ""

    def send(self, view: RunView, state: str, progress: Progress) -> int:
        """Write what is new; steps that were done again drop what was shown of them."""
        if self._writer is None:
            self._begin(view)
        if (first := self._sent.take_back(view)) is not None:
            self._drop(first)
            self._told -= {n for n in self._told if view.findings[n]["step"] >= first}
            self._state = ""
        news = self._sent.news(view)
        done, total = 0, sum(map(len, news.values()))
        wall_ns = 0
        for name, series in news.items():
            for step, value, time_ns in view.timed(series):
                self._scalar(name, value, step, time_ns)
                done += 1
                if done % _TOLD_EVERY == 0:
                    progress(done, total)
            wall_ns = max(wall_ns, time_ns)
        if news:
            self._step = max(int(series.steps[-1]) for series in news.values())
            for name, value in view.summary.items():
                self._scalar(f"run/{name}", value, self._step, wall_ns)
        for number, finding in enumerate(view.findings):
            if number in self._told:
                continue
            text = (
                f"step {finding['step']}: {finding['seen']}  \nIt usually means {finding['means']}"
            )
            self._text(f"findings/{finding['watcher']}", text, finding["step"], wall_ns)
        self._told = set(range(len(view.findings)))
        if state != self._state:
            self._text("run/state", state, self._step, wall_ns)
            self._state = state
        self._writer.flush()
        return done

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _begin(self, view: RunView) -> None:
        for path in self._folder.glob(f"{_EVENTS}{self._suffix}"):
            path.unlink()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder), filename_suffix=self._suffix)
        self._drop(0)
        began_ns = min((ends[0] for _, ends in view.times.values()), default=0)
        self._add(Event(step=0, summary=_hparams(view, began_ns / NS_PER_S)), int(began_ns))
        for name, what in (("params", view.params), ("tags", view.tags)):
            # Indented, so that it is shown as it is and not as Markdown.
            text = json.dumps(dict(what), indent=1).replace("\n", "\n    ")
            self._text(f"run/{name}", f"    {text}", 0, int(began_ns))

    def _drop(self, first: int) -> None:
        """Have whoever reads the file drop what it showed from a step on."""
        self._add(Event(step=first, session_log=SessionLog(status=SessionLog.START)), 0)

    def _scalar(self, name: str, value: float, step: int, wall_ns: int) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._add(Event(step=step, summary=summary), wall_ns)

    def _text(self, name: str, text: str, step: int, wall_ns: int) -> None:
        content = TextPluginData(version=0).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=content)
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(
            tag=f"{name}/text_summary",
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=tensor,
        )
        self._add(Event(step=step, summary=Summary(value=[value])), wall_ns)

    def _add(self, event: Any, wall_ns: int) -> None:
        event.wall_time = wall_ns / NS_PER_S
        self._writer.add_event(event)


def _hparams(view: RunView, began_s: float) -> Any:
    """The settings, as the plugin for hyperparameters wants them."""
    start = SessionStartInfo(start_time_secs=began_s)
    for key, value in view.params.items():
        kinds = {bool: "bool_value", str: "string_value"}
        setattr(start.hparams[key], kinds.get(type(value), "number_value"), value)
    content = HParamsPluginData(version=PLUGIN_DATA_VERSION, session_start_info=start)
    plugin = SummaryMetadata.PluginData(
        plugin_name=PLUGIN_NAME, content=content.SerializeToString()
    )
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=SESSION_START_INFO_TAG, metadata=metadata)])
