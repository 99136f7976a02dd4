"""Kernels of a traced update by group (benchmarks/kernel_shares.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_shares import IDLE, NO_KERNEL, OTHER, Ran, group_of, shares, trace

NATIVE = "void at::native::"
KERNELS = {
    "nvjet_sm90_tss_128x256_64x4_2x1_v_badd_coopA_NTN": "matmul",
    "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversal": "matmul",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, cutlass::": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1": "attention",
    "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 128>(void const*, void const*": "attention",
    "void transformer_engine::normalization::rmsnorm_bwd_finalize_general_kernel<__nv_bfloat16, float,": "norm",
    "_norm_backward": "norm",
    "_swiglu_forward": "swiglu",
    "_rotate": "rotary",
    "_logprob_gradient": "logprobs",
    "void multi_tensor_apply_kernel<TensorListMetadata<1, false>, transformer_engine::multi_tensor_l2norm": "optimizer",
    f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata": "optimizer",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, std": "copies and additions",
    f"{NATIVE}(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::": "copies and additions",
    "Memcpy DtoD (Device -> Device)": "copies and additions",
    f"{NATIVE}indexFuncLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true, at::native::": "indexing",
    f"{NATIVE}reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<flo": OTHER,
}
"""As an H200 names them in updates with torch-native and with Transformer Engine's layers."""


@pytest.mark.parametrize(("name", "group"), KERNELS.items())
def test_each_kernel_is_in_its_group(name: str, group: str):
    assert group_of(name) == group
    assert not NO_KERNEL.search(name)


@pytest.mark.parametrize("name", ["Command Buffer Full", "cudaEventRecordWithFlags", "Optimizer.step#FusedAdam.step"])
def test_what_the_profiler_says_of_itself_is_no_kernel(name: str):
    assert NO_KERNEL.search(name)


def test_shares_are_of_the_whole_and_idle_is_where_nothing_ran():
    ran = [
        Ran("ncclDevKernel_ReduceScatter", 20e6, 60e6, 40e6),
        Ran("nvjet_sm90", 10e6, 30e6, 20e6),
        Ran("nvjet_sm90", 30e6, 40e6, 10e6),
    ]
    assert shares(ran, 100.0) == pytest.approx({"communication": 0.4, "matmul": 0.3, IDLE: 0.5})


def test_operations_are_traced_where_there_is_no_gpu(tmp_path: Path):
    a = torch.randn(512, 512)
    table = tmp_path / "kernels.txt"
    found = trace(lambda: [a @ a for _ in range(50)], str(table))
    assert found["matmul"] > 0.5 and sum(found.values()) == pytest.approx(1.0, abs=0.2)
    assert "aten::mm" in table.read_text()
