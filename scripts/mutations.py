"""The single mutations of a source file: which pieces of it `mutate.py` replaces, and by what.

Operators, comparisons, numbers, truth values and conditions are changed; sorts are reversed; elements of lists, bounds
of slices, keyword arguments, roots and the like are dropped; neighbours in tuples and constructors are swapped; calls
whose result is not used are deleted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

OPERATORS = {
    ast.Lt: ("<", ("<=", ">=")), ast.LtE: ("<=", ("<", ">")), ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")), ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)), ast.In: ("in", ("not in",)), ast.NotIn: ("not in", ("in",)),
    ast.Add: ("+", ("-",)), ast.Sub: ("-", ("+",)), ast.Mult: ("*", ("/",)), ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("%",)), ast.Mod: ("%", ("//",)), ast.Pow: ("**", ("*",)), ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)), ast.BitAnd: ("&", ("|",)), ast.BitOr: ("|", ("&",)), ast.BitXor: ("^", ("|",)),
    ast.And: ("and", ("or",)), ast.Or: ("or", ("and",)),
}  # fmt: skip
PAIRS = (
    ("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("ceil", "floor"), ("any", "all"),
    ("clamp_min", "clamp_max"), ("sum", "mean"), ("log", "log1p"), ("exp", "expm1"), ("zeros_like", "ones_like"),
)  # fmt: skip
SWAPPED = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
DROPPED = {"abs", "sqrt", "rsqrt", "square", "reciprocal", "cumsum", "softmax", "log_softmax"}
# Keyword arguments that say nothing on a CPU, only that lengths are equal, or where a warning points to.
WITHOUT_EFFECT = {"strict", "device", "dtype", "stacklevel"}


class Mutation(NamedTuple):
    """The replacement of a piece of a source file."""

    file: str
    """Path below the package."""
    line: int
    """Line of its first byte, from 1."""
    column: int
    """Column of its first byte, from 1."""
    start: int
    """First byte of the piece."""
    end: int
    """The byte after the piece."""
    new: str
    """What replaces it."""
    text: str
    """The source line."""
    change: str
    """The change as `old -> new`."""
    scope: tuple[str, int, int] | None
    """Name, first and last line of the innermost function around it; None outside functions."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.change}   in   {self.text.strip()}"

    def apply(self, content: bytes) -> bytes:
        """Return the mutated content of the file."""
        return content[: self.start] + self.new.encode() + content[self.end :]


Scope = tuple[str, int, int] | None
Edit = tuple[int, int, str]


def mutations(file: str, content: bytes) -> list[Mutation]:
    """Return the mutations of a file in the order of their places."""
    finder = _Finder(content)
    lines = content.decode().splitlines()
    found = []
    for (start, end, new), scope in sorted(set(finder.walk(ast.parse(content), None)), key=lambda each: each[0]):
        line = content[:start].count(b"\n") + 1
        column = start - content.rfind(b"\n", 0, start)
        change = f"{' '.join(content[start:end].decode().split())} -> {' '.join(new.split())}".strip()
        found.append(Mutation(file, line, column, start, end, new, lines[line - 1], change, scope))
    return found


class _Finder:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._starts = [0]
        for line in content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def walk(self, node: ast.AST, scope: Scope) -> Iterator[tuple[Edit, Scope]]:
        """Yield the edits of a node and of all below it, except where results cannot depend on them."""
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        inner = scope
        match node:
            # Messages. Besides, positions inside f-strings are wrong in Python 3.11.
            case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return
            case ast.keyword(arg=str(name)) if name in WITHOUT_EFFECT:
                return
            case ast.Subscript(value=ast.Name(id="Literal" | "Annotated")):
                return
            case ast.Call(func=ast.Name(id="TypeVar")):
                return
            case ast.Assign(targets=[ast.Name(id=name)]) if name[:1].isupper() and not name.isupper():  # a type
                return
            case ast.FunctionDef(body=body, args=arguments):
                for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
                    yield from self.walk(default, scope)
                inner = (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or 0)
                children = list(body)
            case ast.Lambda(body=value):
                children = [value]
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple(elts=elements)]):
                children = [left, *elements]  # the order does not matter
            case ast.ClassDef(body=body):
                children = list(body)
            case ast.AnnAssign(value=assigned):
                children = [assigned] if assigned else []
            case ast.ExceptHandler(body=body):
                children = list(body)
        for edit in self._edits(node):
            yield edit, inner
        for child in children:
            yield from self.walk(child, inner)

    def _edits(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.BinOp(left=left, op=operator, right=right):
                yield from self._operators(operator, left, right)
            case ast.AugAssign(target=target, op=operator, value=value):
                yield from self._operators(operator, target, value)
            case ast.Compare(left=left, ops=comparisons, comparators=others):
                for (before, after), comparison in zip(pairwise([left, *others]), comparisons, strict=True):
                    yield from self._operators(comparison, before, after)
            case ast.BoolOp(op=operator, values=values):
                for before, after in pairwise(values):
                    yield from self._operators(operator, before, after)
            case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):  # the axis -1 is often 1
                yield *self._span(node), f"({self._text(operand)})"
            case ast.Constant(value=value):
                for new in _other_values(value):
                    yield *self._span(node), new
            case ast.Tuple(elts=[first, second, *_], ctx=ast.Load()):
                yield from self._swap(first, second)
            case ast.List(elts=[first, *_, last] as elements, ctx=ast.Load()):
                yield from self._drop(elements, last)
                if isinstance(first, ast.Starred):
                    yield from self._drop(elements, first)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                        yield *self._span(bound), ""
            case ast.Call():
                yield from self._call(node)
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), "pass"
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from self._negate(test)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield from self._negate(test)

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        start, end = self._span(node.func)
        match node.func:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                bare = isinstance(node.func, ast.Name)
            case _:
                return
        if name in SWAPPED and not (bare and name in ("sum", "mean", "log", "exp")):
            yield end - len(name), end, SWAPPED[name]
        owner = self._content[start : end - len(name)].decode()
        if name in DROPPED and owner not in ("", "torch.", "math.", "np."):
            yield end - len(name) - 1, self._span(node)[1], ""
        order = "reverse=True" if bare else "descending=True"
        if name in ("sorted", "sort", "argsort") and not {"reverse", "descending"} & {k.arg for k in node.keywords}:
            if owner == "np.":
                first, last = self._span(node.args[0])
                yield first, last, f"-({self._text(node.args[0])})"
            else:
                given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
                arguments = ", ".join(self._text(each) for each in given)
                yield end, self._span(node)[1], f"({', '.join(filter(None, [arguments, order]))})"
        for keyword in node.keywords:
            if keyword.arg not in {None, *WITHOUT_EFFECT} and not isinstance(keyword.value, ast.Constant):
                yield from self._drop([*node.args, *node.keywords], keyword)
        if name[:1].isupper() and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
            yield from self._swap(*node.args[:2])

    def _operators(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        """Replace the operator between two operands."""
        if type(operator) not in OPERATORS:
            return
        old, others = OPERATORS[type(operator)]
        start, end = self._span(left)[1], self._span(right)[0]
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._content[start:end])
        place = start + between.index(old.encode())
        for new in others:
            yield place, place + len(old), new

    def _negate(self, test: ast.expr) -> Iterator[Edit]:
        """Negate a condition that has no operator of its own."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield *self._span(test), f"(not ({self._text(test)}))"

    def _swap(self, first: ast.expr, second: ast.expr) -> Iterator[Edit]:
        (start, middle), (again, end) = self._span(first), self._span(second)
        if self._text(first) != self._text(second):
            between = self._content[middle:again].decode()
            yield start, end, self._text(second) + between + self._text(first)

    def _drop(self, elements: Sequence[ast.expr | ast.keyword], dropped: ast.expr | ast.keyword) -> Iterator[Edit]:
        """Drop an element and the comma next to it."""
        place = elements.index(dropped)
        start, end = self._span(dropped)
        if place:
            yield self._span(elements[place - 1])[1], end, ""
        elif len(elements) > 1:
            yield start, self._span(elements[1])[0], ""
        else:
            yield start, end, ""

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        last_line, last_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[last_line - 1] + last_column

    def _text(self, node: ast.expr | ast.keyword) -> str:
        start, end = self._span(node)
        return self._content[start:end].decode()


def _other_values(value: object) -> list[str]:
    match value:
        case bool():
            return [str(not value)]
        case int():
            return [str(value + 1)] + ([str(value - 1)] if value > 0 else [])
        case float():
            return [repr(2 * value) if abs(value) > 1e-6 else "1.0" if value == 0 else "0.0"]
    return []
