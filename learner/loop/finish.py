"""The end of a run, reached or interrupted: checkpoint, export, last evaluation, shutdown message, summary, report."""

from __future__ import annotations

import logging

from learner.loop.run import Run
from learner.publish.export import export_critic, export_model, used_template
from streamrl.errors import StreamrlError

log = logging.getLogger("streamrl.learner")


def finish(run: Run, *, completed: bool) -> None:
    """Collective over the ranks; unless the run is `completed`, actors wait for a resumed learner."""
    run.versions.settle()
    run.checkpoints.save(run.version, last=True)
    run.checkpoints.saving.settle()
    # Before the last evaluation: that may take longer than the other ranks wait inside a collective.
    if completed and run.config.checkpoint.export_hf and not run.config.trainer.eval_only:
        lora = run.config.policy.lora if run.adapter is not None else None
        exported = export_model(
            run.trainer.networks.policy, run.model_dir, run.run_dir / "model", run.ranks, lora=lora,
            dtype=run.trainer.settings.wire_dtype,  # as actors had it
            chat_template=used_template(run.config.data),
        )
        log.info("the trained model is in %s", exported)
        if (critic := run.trainer.networks.critic) is not None:
            log.info("the critic is in %s", export_critic(critic, run.model_dir, run.run_dir / "critic", run.ranks))
    if completed and not (run.config.trainer.eval_only and run.version == 0):
        run.leave_device()
        run.evaluations.start(run.version, wait=True)
    if run.ranks.rank != 0:
        return
    assert run.recorder is not None and run.hub_process is not None
    run.hub.refresh_status()
    stopped = "" if completed else f"stopped: {run.stop.reason or run.hub.halted}"
    run.hub.shutdown(stopped or "the run is finished", finished=completed)
    run.hub_process.wait(timeout_s=run.config.run.shutdown_s)
    run.hub.poll()
    run.evaluations.take()  # one that ended while the run was stopped is in the log, too
    run.samples.close()
    run.recorder.samples(run.step, run.samples.take(), last=True)
    summary = run.recorder.close(
        run.step, run.hub.status, version=run.version, epoch=run.learner_epoch, stopped=stopped,
    )
    log.info("%s after %d steps", "done" if completed else "stopped", summary.steps)


def record_failure(run: Run, error: Exception) -> None:
    """Summary and report of a run that this error ends, with its cause; shuts the actors down. Never raises."""
    if run.recorder is None or run.hub_process is None:
        return
    cause = str(error) if isinstance(error, StreamrlError) else f"{type(error).__name__}: {error}"
    try:
        run.samples.close()
        run.hub.shutdown(f"the run failed: {cause}", finished=False)
        run.recorder.close(
            run.step, run.hub.status, version=run.version, epoch=run.learner_epoch, failed=" ".join(cause.split()),
        )
    except Exception:
        log.exception("the summary of the failed run could not be written")
