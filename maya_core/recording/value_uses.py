"""Finds out, from the source of a program, whether a value that it reads decides what it does: a branch, a loop or a size.

A loss that is printed decides nothing; `if residual < tolerance: break` does, and so does `range(int(count))`. The search begins at the
expression that reads the value, and follows it through expressions, names of the function, and returns. It reads sources only, so it
changes nothing of what the program does.

Two kinds of branches decide nothing that a prediction is about: those whose arms only note things (print, log, save, remember the best
loss), and guards, which end the program with an error if something went wrong. Training is assumed to go well, so a guard also says which
outcome a test that nobody can compute has.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Literal

Kind = Literal["branch", "loop", "size"]
Place = tuple[CodeType, int]  # code and the offset of its present instruction

# Calls that do no work on a GPU, by their last name.
_NOTES = frozenset(
    [
        "print",
        "log",
        "debug",
        "info",
        "warning",
        "warn",
        "error",
        "exception",
        "critical",
        "write",
        "writelines",
        "writerow",
        "flush",
        "close",
        "format",
        "join",
        "append",
        "extend",
        "insert",
        "update",
        "setdefault",
        "get",
        "pop",
        "items",
        "keys",
        "values",
        "add_scalar",
        "add_scalars",
        "add_text",
        "add_histogram",
        "log_metric",
        "log_metrics",
        "log_dict",
        "save",
        "save_pretrained",
        "save_checkpoint",
        "save_model",
        "save_state",
        "savez",
        "dump",
        "dumps",
        "makedirs",
        "mkdir",
        "exists",
        "remove",
        "unlink",
        "rename",
        "replace",
        "copyfile",
        "state_dict",
        "item",
        "tolist",
        "cpu",
        "detach",
        "numpy",
        "float",
        "int",
        "str",
        "repr",
        "bool",
        "len",
        "round",
        "min",
        "max",
        "sum",
        "abs",
        "sorted",
        "list",
        "dict",
        "tuple",
        "set",
        "range",
        "enumerate",
        "zip",
        "isfinite",
        "isnan",
        "isinf",
        "time",
        "perf_counter",
        "monotonic",
        "getattr",
        "setattr",
        "hasattr",
        "isinstance",
        "type",
        "set_description",
        "set_postfix",
        "set_postfix_str",
        "strip",
        "lstrip",
        "rstrip",
        "startswith",
        "endswith",
        "open",
        "Path",
        "dirname",
        "basename",
        "get_rank",
        "is_main_process",
        "zfill",
        "lower",
        "upper",
        "strftime",
        "now",
        "tqdm",
        "init_trackers",
        "end_training",
        "create_repo",
        "upload_folder",
        "create_model_card",
        "SummaryWriter",
        "login",
        "getLogger",
        "setLevel",
        "basicConfig",
        "addHandler",
        "filterwarnings",
        "set_verbosity_info",
        "set_verbosity_error",
        "set_verbosity_warning",
    ]
)
ENDS = frozenset({"exit", "quit", "_exit", "abort", "fail"})  # calls that end the program
# Calls whose result is a number, or numbers, made from their arguments.
NUMBERS = frozenset(
    [
        "int",
        "float",
        "bool",
        "abs",
        "round",
        "min",
        "max",
        "sum",
        "sorted",
        "list",
        "tuple",
        "set",
        "any",
        "all",
        "item",
        "tolist",
        "cpu",
        "detach",
        "numpy",
        "to",
        "long",
        "double",
        "half",
        "clone",
        "mean",
        "median",
        "std",
        "amax",
        "amin",
        "ceil",
        "floor",
        "sqrt",
        "exp",
        "log2",
        "log10",
        "pow",
        "prod",
        "array",
        "asarray",
        "tensor",
        "zip",
        "enumerate",
        "reversed",
        "isclose",
        "allclose",
        "equal",
        "squeeze",
        "flatten",
        "ravel",
        "ceil_div",
        "divmod",
        "next",
        "iter",
        "copy",
        "deepcopy",
        "get",
        "pop",
        "bit_length",
    ]
)
# Calls whose arguments are sizes of tensors.
SIZES = frozenset(
    [
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "randint",
        "randperm",
        "arange",
        "linspace",
        "eye",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "view",
        "reshape",
        "expand",
        "split",
        "tensor_split",
        "narrow",
        "repeat",
        "repeat_interleave",
        "tile",
        "pad",
        "unflatten",
        "topk",
        "unfold",
        "interpolate",
        "split_with_sizes",
        "all_to_all_single",
        "chunk",
        "resize_",
        "broadcast_to",
        "one_hot",
        "islice",
        "grouped_mm",
        "kthvalue",
    ]
)
_NOTING = ("save", "log", "print", "write", "report", "plot")  # calls whose names begin so are notes, too
# What is known of a tensor whatever its values are.
_METADATA = frozenset(["shape", "dtype", "device", "ndim", "requires_grad", "grad", "grad_fn", "is_cuda", "layout"])
_MOST_FRAMES = 8  # followed through returns


@dataclass(frozen=True)
class ValueUse:
    """How a value decides what the program does."""

    kind: Kind
    file: str
    line: int
    leaves_loop: bool = False  # it decides only when a loop ends


@dataclass
class ValueUses:
    """Everything that a value decides, in the order in which it was found."""

    found: list[ValueUse] = field(default_factory=list)
    healthy: bool | None = None  # the outcome of a test that does not end the program
    ending: bool | None = None  # the outcome of a test that ends a loop
    known: bool = True  # whether the source was there to read

    @property
    def steers(self) -> ValueUse | None:
        """What matters most: something that works differently, then a loop that ends earlier or later."""
        return min(self.found, key=lambda use: use.leaves_loop, default=None)


def uses_of(frames: Sequence[Place]) -> ValueUses:
    """What a value decides that is read in the innermost of these frames, which come first."""
    return _uses(tuple(frames[:_MOST_FRAMES]))


@lru_cache(maxsize=4096)
def _uses(frames: tuple[Place, ...]) -> ValueUses:
    uses = ValueUses()
    _Search(uses, frames).run()
    return uses


# ---- sources ----


@dataclass(frozen=True, eq=False)
class ProgramSource:
    file: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    by_position: dict[tuple[int, int, int, int], list[ast.expr]]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The node's parent, its parent, and so on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: ast.AST) -> ast.AST:
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
        return next((each for each in self.above(node) if isinstance(each, scopes)), self.tree)


@lru_cache(maxsize=64)
def source_of(file: str) -> ProgramSource | None:
    text = "".join(linecache.getlines(file))
    if not text:
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a notebook's cell with magic commands, say
        return None
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    by_position: dict[tuple[int, int, int, int], list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None:
            where = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            by_position.setdefault(where, []).append(node)
    return ProgramSource(file, tree, parents, by_position)


def _instruction(code: CodeType, offset: int) -> str:
    return dis.opname[code.co_code[offset]] if 0 <= offset < len(code.co_code) else ""


def _tests(instruction: str) -> bool:
    """Whether it takes the truth of what the instruction before it has computed."""
    return "JUMP" in instruction or instruction in ("TO_BOOL", "UNARY_NOT")


_BETWEEN = ("CACHE", "NOP", "COPY", "EXTENDED_ARG")  # instructions that compute nothing


def _expression(source: ProgramSource, place: Place) -> ast.expr | None:
    """The expression that the frame is computing."""
    code, offset = place
    if hasattr(code, "co_positions"):
        if _tests(_instruction(code, offset)):  # its own position is that of the statement, in some versions of Python
            offset -= 2
            while offset > 0 and _instruction(code, offset) in _BETWEEN:
                offset -= 2
        line, end_line, column, end_column = next(
            (each for number, each in enumerate(code.co_positions()) if number == offset // 2), (None,) * 4
        )
        if line is None or end_line is None or column is None or end_column is None:
            return None
        found = source.by_position.get((line, end_line, column, end_column), [])
        return found[-1] if found else None  # the innermost of those that begin and end together
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return _likely(source, line)


def _likely(source: ProgramSource, line: int | None) -> ast.expr | None:
    """Python 3.10 knows only the line: the test of a statement there, or the first call that may read a value."""
    here = [node for node in ast.walk(source.tree) if getattr(node, "lineno", None) == line]
    calls = [node for node in here if isinstance(node, ast.Call) and _name(node.func) in NUMBERS | SIZES]
    tests = [node.test for node in here if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp)]
    return next(iter([*calls, *tests]), None)


def _name(function: ast.expr) -> str:
    """The last name of what is called: `sum` of `x.mask.sum`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# ---- the search ----


class _Search:
    """Follows one value from where it is read."""

    def __init__(self, uses: ValueUses, frames: tuple[Place, ...]) -> None:
        self.uses = uses
        self.frames = frames
        self.seen: set[int] = set()
        self.compared = False  # so the outcome of a test is not the value itself
        self.filtered = False  # a list has elements only where a test is true, so its length is unknown, too

    def run(self) -> None:
        self._in_frame(0)

    def _in_frame(self, number: int, read: bool = True) -> None:
        """Follows the value of the expression that a frame is computing: what was read, or the result of a call."""
        if number >= len(self.frames):
            return
        code, offset = self.frames[number]
        source = source_of(code.co_filename)
        node = _expression(source, (code, offset)) if source is not None else None
        if source is None or node is None:
            if read:
                self.uses.known = False
            return
        instruction = _instruction(code, offset)
        if read and _tests(instruction):
            self._test(source, node, number)
        elif read and instruction.startswith(("BINARY_S", "STORE_SUBSCR", "STORE_SLICE")):
            self._subscript(source, node)
        elif read and isinstance(node, ast.Call) and _name(node.func) in SIZES:
            self._note("size", source, node)
        elif read and isinstance(node, ast.Call) and _name(node.func) == "range":
            self._note("loop", source, node)
        elif not isinstance(node, ast.Call) or not read or _name(node.func) in NUMBERS or self._is_test(source, node):
            self._value(source, node, number)

    def _note(self, kind: Kind, source: ProgramSource, node: ast.AST, leaves_loop: bool = False) -> None:
        self.uses.found.append(ValueUse(kind, source.file, getattr(node, "lineno", 0), leaves_loop))

    @staticmethod
    def _is_test(source: ProgramSource, node: ast.expr) -> bool:
        """Whether a call's result is tested at once, as in `if torch.equal(a, b)`."""
        parent = source.parents.get(node)
        return isinstance(parent, ast.If | ast.While | ast.Assert | ast.IfExp | ast.BoolOp | ast.UnaryOp | ast.Compare)

    def _subscript(self, source: ProgramSource, node: ast.expr) -> None:
        if isinstance(node, ast.Subscript) and any(isinstance(each, ast.Slice) for each in ast.walk(node.slice)):
            self._note("size", source, node)

    # ---- values ----
    def _value(self, source: ProgramSource, node: ast.expr, frame: int) -> None:
        """Follows the value of an expression to where it is used."""
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        parent = source.parents.get(node)
        if (isinstance(parent, ast.If | ast.While | ast.Assert) and parent.test is node) or (
            isinstance(parent, ast.IfExp) and parent.test is node
        ):
            self._test(source, node, frame)
        elif isinstance(parent, ast.comprehension):
            self._comprehension(source, parent, node, frame)
        elif isinstance(parent, ast.For | ast.AsyncFor) and parent.iter is node:
            if self.filtered and _Arms.of(parent.body).works:
                self._note("loop", source, parent)
            self._target(source, parent.target, frame)
        elif isinstance(parent, ast.Slice):
            self._note("size", source, node)
        elif isinstance(parent, ast.Call):
            self._argument(source, parent, node, frame)
        elif isinstance(parent, ast.keyword) and isinstance(call := source.parents.get(parent), ast.Call):
            self._argument(source, call, node, frame)
        elif isinstance(parent, ast.Attribute):
            if parent.attr not in _METADATA:
                self._value(source, parent, frame)
        elif isinstance(parent, ast.Compare):
            if not isinstance(parent.ops[0], ast.Is | ast.IsNot):
                self.compared = True
                self._value(source, parent, frame)
        elif isinstance(parent, ast.Return):
            self._in_frame(frame + 1, read=False)
        elif isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            for target in parent.targets if isinstance(parent, ast.Assign) else [parent.target]:
                self._target(source, target, frame)
            if isinstance(parent, ast.NamedExpr):
                self._value(source, parent, frame)
        elif isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod) and _is_text(parent.left):
            return  # "%.3f" % loss
        elif isinstance(parent, ast.expr) and not isinstance(parent, ast.FormattedValue | ast.JoinedStr | ast.Lambda):
            if not (isinstance(parent, ast.Subscript) and node is not parent.value):
                self._value(source, parent, frame)
            elif isinstance(call := source.parents.get(parent), ast.Call) and call.func is parent:
                self._note("branch", source, node)  # experts[number](x)

    def _comprehension(self, source: ProgramSource, part: ast.comprehension, node: ast.expr, frame: int) -> None:
        whole = source.parents[part]
        assert isinstance(whole, ast.expr)
        if node not in part.ifs:  # it runs over unknown numbers; how many there are is known
            self._target(source, part.target, frame, within=whole)
            return
        arms = _Arms()
        arms.expressions([each for name in ("elt", "key", "value") if (each := getattr(whole, name, None)) is not None])
        if arms.works:
            self._note("branch", source, node)
        else:
            self.filtered = True
            self._value(source, whole, frame)

    def _argument(self, source: ProgramSource, call: ast.Call, node: ast.expr, frame: int) -> None:
        name = _name(call.func)
        if node is call.func:
            if not isinstance(node, ast.Attribute) or name in NUMBERS:
                self._value(source, call, frame)
        elif name == "range":
            self._note("loop", source, call)
        elif name in SIZES:
            self._note("size", source, call)
        elif name in ("append", "extend", "insert", "update") and isinstance(call.func, ast.Attribute):
            self._target(source, call.func.value, frame)
        elif name in NUMBERS or (name == "len" and self.filtered):
            self._value(source, call, frame)

    def _target(self, source: ProgramSource, target: ast.expr, frame: int, within: ast.AST | None = None) -> None:
        """Follows a name, an attribute or an entry to all its uses in the same function, or within one expression."""
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._target(source, each, frame, within)
            return
        if isinstance(target, ast.Starred):
            target = target.value
        text = ast.unparse(target)
        for node in ast.walk(within or source.function(target)):
            loads = isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load)
            if loads and type(node) is type(target) and ast.unparse(node) == text:
                self._value(source, node, frame)

    # ---- tests ----
    def _test(self, source: ProgramSource, node: ast.expr, frame: int) -> None:
        """Decides what depends on a test, of which the expression is a part."""
        negated, outer = False, node
        for parent in source.above(node):
            if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
                negated = not negated
            elif not isinstance(parent, ast.BoolOp | ast.Compare):
                break
            outer = parent
        owner = source.parents.get(outer)
        if isinstance(owner, ast.Assert):
            self._healthy(not negated)
        elif isinstance(owner, ast.If) and owner.test is outer:
            self._branch(source, owner, negated, frame)
        elif isinstance(owner, ast.While) and owner.test is outer:
            self._note("loop", source, owner, leaves_loop=True)
            self._ending(negated)
        elif isinstance(owner, ast.IfExp) and owner.test is outer:
            self._value(source, owner, frame)
        elif isinstance(owner, ast.comprehension):
            self._comprehension(source, owner, outer, frame)
        else:
            self._value(source, outer, frame)

    def _healthy(self, outcome: bool) -> None:
        if self.uses.healthy is None and not self.compared:
            self.uses.healthy = outcome

    def _ending(self, outcome: bool) -> None:
        if self.uses.ending is None and not self.compared:
            self.uses.ending = outcome

    def _branch(self, source: ProgramSource, branch: ast.If, negated: bool, frame: int) -> None:
        if _ends_program(branch.body):
            return self._healthy(negated)
        if branch.orelse and _ends_program(branch.orelse):
            return self._healthy(not negated)
        arms = _Arms.of([*branch.body, *branch.orelse])
        if arms.works:
            self._note("branch", source, branch)
        elif arms.leaves_loop:
            self._note("loop", source, branch, leaves_loop=True)
            self._ending(_Arms.of(branch.body).leaves_loop != negated)
        elif arms.returns:
            if _Arms.of(statements_after(source, branch)).works:
                self._note("branch", source, branch)
            else:  # the caller gets one result or another
                self._in_frame(frame + 1, read=False)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _ends_program(body: list[ast.stmt]) -> bool:
    """Whether these statements only end the program, perhaps after a message."""
    last = body[-1]
    ends = isinstance(last, ast.Raise) or (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and _name(last.value.func) in ENDS
    )
    before = _Arms.of(body[:-1])
    return ends and not (before.works or before.leaves_loop)


def statements_after(source: ProgramSource, statement: ast.stmt) -> list[ast.stmt]:
    """The statements of the function that follow a statement."""
    after: list[ast.stmt] = []
    node: ast.AST = statement
    for parent in source.above(statement):
        for body in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and node in body:
                after += body[body.index(node) + 1 :]
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            break
        node = parent
    return after


def only_notes(body: list[ast.stmt], also: frozenset[str] = frozenset()) -> bool:
    """Whether these statements only note things: print, log, save. Calls of the names in `also` do no work, either."""
    arms = _Arms(also)
    arms.read(body)
    return not arms.works


def called(call: ast.Call) -> str:
    """The last name of what is called: `save` in `torch.save(...)`."""
    return _name(call.func)


class _Arms:
    """What the arms of a branch do."""

    def __init__(self, also: frozenset[str] = frozenset()) -> None:
        self.also = also  # calls that do no work, beside notes
        self.works = False  # something that may use a GPU
        self.leaves_loop = False
        self.returns = False

    @classmethod
    def of(cls, body: list[ast.stmt]) -> _Arms:
        arms = cls()
        arms.read(body)
        return arms

    def read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        inside: list[ast.stmt] = []
        if isinstance(statement, ast.Raise):
            return
        if isinstance(statement, ast.Break):
            self.leaves_loop = True
        elif isinstance(statement, ast.Continue | ast.FunctionDef | ast.ClassDef):
            self.works = self.works or isinstance(statement, ast.Continue)
            return
        elif isinstance(statement, ast.Return):
            self.returns = True
        for name, value in ast.iter_fields(statement):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                inside += value
            elif name == "handlers":
                inside += [each for handler in value for each in handler.body]
            elif isinstance(value, ast.AST) or (isinstance(value, list) and all(isinstance(v, ast.AST) for v in value)):
                self.expressions(value if isinstance(value, list) else [value])
        loops = isinstance(statement, ast.For | ast.While)
        outside = self.leaves_loop
        self.read(inside)
        if loops:  # a break inside leaves only that loop
            self.leaves_loop = outside

    def expressions(self, roots: Sequence[ast.AST]) -> None:
        for root in roots:
            for node in ast.walk(root):
                if isinstance(node, ast.Call) and not self._is_note(_name(node.func)):
                    self.works = True

    def _is_note(self, name: str) -> bool:
        return name in _NOTES or name in ENDS or name in self.also or name.lstrip("_").startswith(_NOTING)
