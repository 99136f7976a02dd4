"""An engine kind: the policy's model in Hugging Face transformers, on the CPU (docs/extending.md)."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.config import Config
from skyrl_train.engines.protocol import EngineFacts, EngineKind
from skyrl_train.engines.settings import EngineSettings, PauseMode, room_to_answer
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.channels.channel import ReceivingEnd
from skyrl_train.weight_sync.channels.table import open_receiver
from skyrl_train.weight_sync.control import ControlMessage, WeightSyncError
from skyrl_train.weight_sync.digest import compare
from skyrl_train.weight_sync.transport import Receiver


class TransformersEngine:
    """Samples requests of equal prompt length together, with temperature alone."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        dtype = getattr(torch, settings.generator.model_dtype)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=dtype).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(settings.model_path)
        self._weights = dict(self._model.named_parameters())
        self._random = torch.Generator().manual_seed(settings.seed)
        self._running = asyncio.Event()
        self._busy = asyncio.Lock()  # one thread at a time uses the model
        self._receivers: dict[str, Receiver] = {}
        self._digests: dict[str, int] = {}
        self._version, self._is_complete = 0, True

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        if not waits_for_weights:
            self._running.set()
        return EngineFacts(num_workers=1)

    async def ping(self, timeout_s: float) -> None:
        """This coroutine answers: the process is alive."""

    async def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        batches: dict[tuple[int, SamplingParams], list[tuple[int, list[int]]]] = {}
        for index, token_ids, params in requests:
            batches.setdefault((len(token_ids), replace(params, seed=None)), []).append((index, token_ids))
        for (length, params), batch in batches.items():
            max_tokens = min(params.max_generate_length, room_to_answer(length, self._settings.max_model_len))
            await self._running.wait()
            async with self._busy:
                prompts = torch.tensor([token_ids for _, token_ids in batch])
                answers = await asyncio.to_thread(self._sample, prompts, params.temperature, max_tokens)
            yield [(index, answer) for (index, _), answer in zip(batch, answers, strict=True)]

    @torch.no_grad()
    def _sample(self, prompts: Tensor, temperature: float, max_tokens: int) -> list[Generation]:
        """Args: prompts: [B, L]."""
        read, cache, tokens, logprobs = prompts, None, [], []
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        while len(tokens) < max_tokens and not ended.all():
            output = self._model(read, past_key_values=cache, use_cache=True)
            logits, cache = output.logits[:, -1].float(), output.past_key_values
            row = (logits / (temperature or 1.0)).log_softmax(-1)
            read = row.exp().multinomial(1, generator=self._random) if temperature else row.argmax(-1, keepdim=True)
            tokens.append(read)
            logprobs.append(row.gather(1, read))
            ended |= read[:, 0] == self._tokenizer.eos_token_id
        return [
            self._generation(*both)
            for both in zip(torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        ]

    def _generation(self, token_ids: list[int], logprobs: list[float]) -> Generation:
        """The tokens up to the end of sequence, which is one of them."""
        eos = self._tokenizer.eos_token_id
        length = token_ids.index(eos) + 1 if eos in token_ids else len(token_ids)
        text = self._tokenizer.decode(token_ids[:length], skip_special_tokens=True)
        reason = "stop" if eos in token_ids else "length"
        return Generation(token_ids[:length], logprobs[:length], text, reason, policy_version=self._version)

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        async with self._busy:
            return [await asyncio.to_thread(self._score, torch.tensor([token_ids])) for token_ids in prompts]

    @torch.no_grad()
    def _score(self, tokens: Tensor) -> list[float]:
        rows = self._model(tokens).logits[0, :-1].float().log_softmax(-1)
        return [0.0, *rows.gather(1, tokens[0, 1:, None])[:, 0].tolist()]

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Whatever the mode, the batch that is being sampled is finished with the old weights."""
        self._running.clear()
        async with self._busy:
            pass

    async def resume(self) -> None:
        if not self._is_complete:
            raise WeightSyncError("the last weight update did not complete: the engine stays paused until one has")
        self._running.set()

    async def init_weight_sync(self, info: ControlMessage) -> None:
        if info["sender"] in self._receivers:
            self._receivers.pop(info["sender"]).close()
        end = ReceivingEnd(info, worker_rank=0, device=torch.device("cpu"))
        self._receivers[info["sender"]] = Receiver(await asyncio.to_thread(open_receiver, end))

    async def begin_weight_update(self) -> None:
        await self.pause()
        self._digests, self._is_complete = {}, False

    async def update_weights(self, message: ControlMessage) -> None:
        """Each pipeline stage of the trainer is a sender of its own."""
        async with self._busy:
            receive = self._receivers[message["sender"]].receive
            self._digests |= await asyncio.to_thread(receive, message, self._load)

    def _load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:  # views of a buffer that is overwritten next
            if name not in self._weights or self._weights[name].shape != tensor.shape:
                raise WeightSyncError(f"the model has no parameter {name} of shape {tuple(tensor.shape)}")
            self._weights[name].data.copy_(tensor)

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        compare(sent_digests, self._digests)
        if missing := self._weights.keys() - self._digests.keys():
            raise WeightSyncError(f"the trainer did not send {', '.join(sorted(missing))}")
        self._version, self._is_complete = policy_version, True

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Its devices are not shared: see `problems`."""

    async def wake_weights(self) -> None: ...

    async def wake_kv_cache(self) -> None: ...

    async def memory(self) -> list[dict[str, float]]:
        return []

    async def shutdown(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def problems(config: Config) -> Iterator[str]:
    """Checked before anything starts; each problem is one sentence."""
    generator = config.generator
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(generator, name)
        if params.stop or (params.top_p, params.top_k, params.min_p) != (1.0, -1, 0.0):
            yield f"generator.{name} has stop, top_p, top_k or min_p: own_engine has none of them. Remove them"
    if config.trainer.placement.colocate_all:
        yield "trainer.placement.colocate_all is true: own_engine does not sleep. Set it to false"
    if generator.inference_engine_tensor_parallel_size > 1:
        yield "generator.inference_engine_tensor_parallel_size is above 1: own_engine has one worker. Set it to 1"


ENGINE = EngineKind(engine="own_engine:TransformersEngine", problems="own_engine:problems")
