"""What goes wrong between a sender of weights and its receivers."""


class WeightSyncError(RuntimeError):
    """The engine did not get the trainer's weights; it must not draw samples."""


class PeerLostError(WeightSyncError):
    """The other end is gone, or did not answer in time; it may have said why elsewhere."""


class SyncCheckFailed(RuntimeError):
    """An engine computes other logprobs than the trainer."""
