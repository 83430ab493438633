"""Arithmetic in recipes, such as `gpus // (tp * pp)` or `batch % (dp * micro) == 0`.

An expression consists of names, numbers, text, operators and comparisons. It can call only min, max, ceil and floor, so a recipe
cannot run other Python code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

Value = bool | int | float | str

_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}


class Expression:
    """An expression of a recipe, parsed once. A ValueError explains what is wrong with it."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"'{text}' is not an expression: {error.msg}") from error
        self.names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node.id not in _CALLS}
        self._check(self._tree)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        try:
            return self._value(self._tree, values)
        except ZeroDivisionError as error:
            raise ValueError(f"'{self.text}' divides by zero") from error
        except (TypeError, OverflowError) as error:
            raise ValueError(f"'{self.text}': {error}") from error

    def _check(self, node: ast.AST) -> None:
        allowed = (
            ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant, ast.Tuple, ast.List,
            ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
        )  # fmt: skip
        for part in ast.walk(node):
            if not isinstance(part, allowed):
                raise ValueError(
                    f"'{self.text}': {type(part).__name__} is not supported, only arithmetic and comparisons are"
                )
            if isinstance(part, ast.Call) and (getattr(part.func, "id", None) not in _CALLS or part.keywords):
                raise ValueError(f"'{self.text}': only {', '.join(_CALLS)} can be called")
            if isinstance(part, ast.BinOp) and type(part.op) not in _BINARY:
                raise ValueError(f"'{self.text}': {type(part.op).__name__} is not supported")
            if isinstance(part, ast.UnaryOp) and type(part.op) not in _UNARY:
                raise ValueError(f"'{self.text}': {type(part.op).__name__} is not supported")
            if isinstance(part, ast.Compare) and any(type(op) not in _COMPARE for op in part.ops):
                raise ValueError(f"'{self.text}': this comparison is not supported")

    def _value(self, node: ast.AST, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return values[node.id]
            case ast.Tuple() | ast.List():
                return [self._value(one, values) for one in node.elts]
            case ast.BinOp():
                return _BINARY[type(node.op)](self._value(node.left, values), self._value(node.right, values))
            case ast.UnaryOp():
                operand = self._value(node.operand, values)
                return _UNARY[type(node.op)](operand)
            case ast.BoolOp():
                every = isinstance(node.op, ast.And)
                for one in node.values:
                    found = self._value(one, values)
                    if bool(found) != every:
                        return found
                return found
            case ast.Compare():
                left = self._value(node.left, values)
                for op, other in zip(node.ops, node.comparators, strict=True):
                    right = self._value(other, values)
                    if not _COMPARE[type(op)](left, right):
                        return False
                    left = right
                return True
            case ast.IfExp():
                return self._value(node.body if self._value(node.test, values) else node.orelse, values)
            case ast.Call():
                return _CALLS[getattr(node.func, "id", "")](*(self._value(one, values) for one in node.args))
        raise AssertionError(node)
