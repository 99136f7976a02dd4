"""What the process of an engine's core imports first (`imports.first_in_children`), in less time than vLLM would."""

from __future__ import annotations

from skyrl_train.engines.vllm.orphan import end_with_parent
from skyrl_train.imports import quick_imports

end_with_parent()
with quick_imports():
    import vllm.v1.engine.core  # noqa: F401
