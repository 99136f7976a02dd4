"""Training for agents that run elsewhere: they ask the engines over HTTP and hand in what is to be trained on."""

from skyrl_train.service.client import TrainingService
from skyrl_train.service.job import ChatSample, TokenSample
from skyrl_train.service.queue import JobFailed, ServiceBroken, StaleSamples

__all__ = ["ChatSample", "JobFailed", "ServiceBroken", "StaleSamples", "TokenSample", "TrainingService"]
