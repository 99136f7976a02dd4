"""Looks after the engines while no job does."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from skyrl_train.service.job import CareJob
from skyrl_train.service.queue import JobFailed, JobQueue, ServiceBroken

log = logging.getLogger(__name__)


async def watch(queue: JobQueue[Any, Any], every_s: float) -> None:
    """Put a CareJob into a queue that has nothing to do, for ever; returns when the queue takes no more.

    In a run the driver hears of a dead engine because it asks it for samples; a service's driver asks nothing between
    two jobs. While a job runs its weight sync finds the dead.
    """
    while True:
        await asyncio.sleep(every_s)
        if not queue.is_idle:
            continue
        try:
            await queue.submit(CareJob())
        except JobFailed as error:
            log.warning("the care for the engines failed: %s", error)
        except ServiceBroken as error:
            log.error("the engines are watched no more: %s", error)
            return
