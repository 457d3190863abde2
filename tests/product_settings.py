"""The private settings of products: made small, little arrays go every way through the engine."""

from collections.abc import Mapping

import pytest

from accel_ops.cpu import half_products, matrix_products, product_pieces, products, vector_products

MODULES = (half_products, matrix_products, product_pieces, products, vector_products)


def set_everywhere(patch: pytest.MonkeyPatch, settings: Mapping[str, object]) -> None:
    """Set each name in every module that has it: some import it from another."""
    for name, value in settings.items():
        holders = [module for module in MODULES if hasattr(module, name)]
        assert holders, f"no module has {name}"
        for module in holders:
            patch.setattr(module, name, value)
