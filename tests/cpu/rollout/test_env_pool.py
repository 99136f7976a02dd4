import asyncio
import threading
import time

import pytest

from skyrl_train.rollout.env_pool import CallTimeout, EnvPool


@pytest.fixture
def make_pool():
    pools = []

    def make(max_workers=2, timeout_s=5.0):
        pools.append(EnvPool(max_workers, timeout_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(timeout_s=2.0)


def test_results_and_errors_reach_the_callers_that_await_them(make_pool):
    async def main():
        pool = make_pool()
        results = await asyncio.gather(*[pool.submit(lambda i=i: 1 // i) for i in (1, 0, -1)], return_exceptions=True)
        assert results[0] == 1 and results[2] == -1
        assert isinstance(results[1], ZeroDivisionError)

    asyncio.run(main())


def test_event_loop_continues_while_a_call_blocks(make_pool):
    async def main():
        released = threading.Event()
        call = make_pool().submit(lambda: released.wait(60))
        await asyncio.sleep(0.01)
        assert not call.done()
        released.set()
        assert await call

    asyncio.run(main())


class Crowd:
    """Counts how many threads are in it at once."""

    def __init__(self):
        self.here, self.most, self.lock = 0, 0, threading.Lock()

    def visit(self):
        with self.lock:
            self.here += 1
            self.most = max(self.most, self.here)
        time.sleep(0.01)
        with self.lock:
            self.here -= 1


def test_at_most_max_workers_calls_run_at_once(make_pool):
    async def main():
        pool, crowd = make_pool(max_workers=3), Crowd()
        await asyncio.gather(*[pool.submit(crowd.visit) for _ in range(20)])
        assert crowd.most == 3

    asyncio.run(main())


def test_time_in_the_queue_does_not_count_against_the_deadline(make_pool):
    async def main():
        pool = make_pool(max_workers=1, timeout_s=1.5)
        await asyncio.gather(*[pool.submit(lambda: time.sleep(0.4)) for _ in range(4)])

    asyncio.run(main())


def test_hanging_call_fails_at_its_deadline_and_its_thread_is_replaced(make_pool):
    async def main():
        released = threading.Event()
        pool = make_pool(max_workers=1, timeout_s=1.0)
        hanging, behind = pool.submit(lambda: released.wait(60)), pool.submit(lambda: "next")
        start_s = time.monotonic()
        with pytest.raises(CallTimeout, match="still running after 1 s"):
            await hanging
        assert await behind == "next"
        assert time.monotonic() - start_s < 30.0
        released.set()  # the thread left behind must not become a second worker
        crowd = Crowd()
        await asyncio.gather(*[pool.submit(crowd.visit) for _ in range(10)])
        assert crowd.most == 1

    asyncio.run(main())


def test_cancelled_call_is_taken_out_of_the_queue(make_pool):
    async def main():
        released, ran = threading.Event(), []
        pool = make_pool(max_workers=1)
        first, second = pool.submit(lambda: released.wait(60)), pool.submit(lambda: ran.append(1))
        second.cancel()
        released.set()
        await first
        await pool.submit(lambda: None)
        assert ran == []

    asyncio.run(main())


def test_pool_serves_one_event_loop_after_another(make_pool):
    pool = make_pool()

    async def main():
        return await asyncio.gather(*[pool.submit(lambda i=i: i) for i in range(5)])

    assert [asyncio.run(main()) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("ends_s", [0.0, 0.1])
def test_loop_that_ended_in_the_middle_of_a_call_does_not_disturb_the_next(make_pool, ends_s):
    pool, released = make_pool(max_workers=1), threading.Event()

    async def leave():
        pool.submit(lambda: released.wait(60))
        await asyncio.sleep(0.01)

    async def main():
        return await asyncio.wait_for(pool.submit(lambda: "well"), 60)

    asyncio.run(leave())
    released.set()
    time.sleep(ends_s)  # the call ends while the next loop runs, or while there is none
    assert asyncio.run(main()) == "well"


def test_close_lets_queued_calls_finish_and_does_not_wait_for_a_hanging_one(make_pool):
    ran, released = [], threading.Event()
    pool = make_pool(max_workers=2)

    async def main():
        pool.submit(lambda: released.wait(60))
        for i in range(3):
            pool.submit(lambda i=i: ran.append(i))

    asyncio.run(main())
    start_s = time.monotonic()
    pool.close(timeout_s=1.5)
    assert time.monotonic() - start_s < 30.0
    assert ran == [0, 1, 2]
    released.set()


def test_threads_do_not_keep_python_alive(make_pool):
    async def main():
        return await make_pool().submit(lambda: threading.current_thread().daemon)

    assert asyncio.run(main())
