"""torch, imported when it is first used. Pricing a saved trace needs the descriptions of ops, but not torch, which takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch as real

            return getattr(real, name)

    torch = _Torch()
