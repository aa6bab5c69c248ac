"""Which attention a device gets, unless the caller brings one.

Its own file because it alone imports the GPU form, and only where there is a GPU: a laptop has no Triton.
"""

from __future__ import annotations

import torch

from moe.attention.base import AttentionBackend
from moe.attention.sdpa_by_token import TorchAttentionByToken
from moe.attention.torch_sdpa import TorchAttention


def choose_attention(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> AttentionBackend:
    """The fused form on a CUDA device in a 16-bit type, else torch's own functions; token by token where a token must
    not depend on its batch (see `ModelConfig.batch_invariant`)."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        from moe.attention.cuda import CudaAttention
        from moe.attention.cuda_by_token import CudaAttentionByToken

        return CudaAttentionByToken if batch_invariant else CudaAttention
    return TorchAttentionByToken if batch_invariant else TorchAttention
