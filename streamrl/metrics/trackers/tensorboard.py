"""TensorBoard: event files in `tensorboard/` of the run directory, written without TensorFlow."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from streamrl.metrics.samples import Sample
from streamrl.metrics.sinks import Row, Sink, TrackedRun
from streamrl.metrics.trackers.sample_tables import markdown_of


class TensorBoardSink(Sink):
    """Scalars and histograms by step, configuration and samples as text, in a log directory of the run's own.

    A resumed run continues it, and TensorBoard hides the steps that are done again.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._directory = run.run_dir.resolve() / "tensorboard"
        self._writer = EventFileWriter(str(self._directory), flush_secs=10)
        if run.resume_step is not None:  # what an earlier part logged after this step never happened
            self._add(run.resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._text(0, "config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def log_metrics(self, step: int, metrics: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, summary=Summary(value=[
            Summary.Value(tag=key, histo=_histogram(value)) if isinstance(value, Mapping)
            else Summary.Value(tag=key, simple_value=value)
            for key, value in metrics.items() if key != "step" and value != {}
        ]))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._text(step, "samples", markdown_of(samples))

    def where(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._directory.parent.parent))}"

    def close(self) -> None:
        self._writer.close()

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        self._add(step, summary=Summary(value=[Summary.Value(
            tag=f"{tag}/text_summary",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape),
        )]))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=datetime.now(UTC).timestamp(), step=step, **content))


def _histogram(bins: Mapping[int, int]) -> Any:
    """Counts of integers; the bucket of k ends at k + 0.5."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    values = sorted(bins)
    return HistogramProto(
        min=values[0], max=values[-1], num=sum(bins.values()), sum=sum(value * bins[value] for value in values),
        sum_squares=sum(value * value * bins[value] for value in values),
        bucket_limit=[value + 0.5 for value in range(values[0] - 1, values[-1] + 1)],
        bucket=[bins.get(value, 0) for value in range(values[0] - 1, values[-1] + 1)],
    )
