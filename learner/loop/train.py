"""The training loop, on one screen: each line is a step of the algorithm; overlap and elasticity live elsewhere."""

from __future__ import annotations

from learner.loop.run import Run


def train(run: Run) -> bool:
    """Train until the steps are done (True) or a stop is requested (False)."""
    run.versions.publish(run.version)  # a broken weight path fails here, before the first step
    run.evaluate_at_start()
    for step in run.remaining_steps():
        trained = run.train_next_batch()  # waits for a batch whose every group is inside the lag bound
        if trained is None:
            return False
        run.publish_if_due()  # actors fetch it while the next batch is awaited
        run.source.commit_batch(run.version, trained)
        if not trained.result.skipped:
            run.evaluate_if_due()
        run.record(step, trained)  # before the checkpoint, or a crash between them loses the row
        if not trained.result.skipped:
            run.checkpoints.save_if_due(run.version)
    return True
