"""Training service for external agents: they query the engines over HTTP and submit samples with rewards."""

from skyrl_train.service.client import TrainingService
from skyrl_train.service.job import ChatSample, TokenSample
from skyrl_train.service.queue import JobFailed, ServiceBroken, StaleSamples

__all__ = ["ChatSample", "JobFailed", "ServiceBroken", "StaleSamples", "TokenSample", "TrainingService"]
