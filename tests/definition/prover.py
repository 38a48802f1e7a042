"""Shows that a claim holds for all numbers, by running it on unknown ones.

A claim is an ordinary function that returns a bool. `prove` calls it with unknown numbers. Where two of them are
compared, the solver says which answers are still possible; where both are, this run goes on with one answer and a later
run takes the other. So `if`, `sorted`, `min` and `==` need no rewriting, a run is a plain list of facts, and the claim
holds if every possible run ends in True. A run that divides by 0 or takes a negative number's root ends in False.
"""

import contextlib
import inspect
import math
import operator
from fractions import Fraction

import z3


class Refuted(AssertionError):
    """The claim does not always hold; the message has numbers for which it does not."""


class _Vacuous(Exception):
    """The numbers of this run do not meet a premise."""


def assume(premise):
    """What a claim is to be shown under."""
    if not premise:
        raise _Vacuous


class Scalar:
    """An unknown number. A Python NaN swallows what it meets, and compares as False."""

    __hash__ = None

    def __init__(self, term, run):
        self.term, self.run = term, run

    def _combined(self, operation, *operands):
        if any(isinstance(x, float) and math.isnan(x) for x in operands):
            return math.nan
        return Scalar(self.run.rounded(operation, *map(self.run.term, operands)), self.run)

    def _compared(self, relation, other):
        if isinstance(other, float) and math.isnan(other):
            return False
        return self.run.decide(relation(self.term, self.run.term(other)))

    def __add__(self, other):
        return self._combined(operator.add, self, other)

    def __sub__(self, other):
        return self._combined(operator.sub, self, other)

    def __rsub__(self, other):
        return self._combined(operator.sub, other, self)

    def __mul__(self, other):
        return self._combined(operator.mul, self, other)

    def __truediv__(self, other):
        return self._combined(self.run.quotient, self, other)

    def __rtruediv__(self, other):
        return self._combined(self.run.quotient, other, self)

    def __neg__(self):
        return Scalar(-self.term, self.run)

    def __abs__(self):
        return Scalar(self.run.magnitude(self.term), self.run)

    def __lt__(self, other):
        return self._compared(operator.lt, other)

    def __le__(self, other):
        return self._compared(operator.le, other)

    def __gt__(self, other):
        return self._compared(operator.gt, other)

    def __ge__(self, other):
        return self._compared(operator.ge, other)

    def __eq__(self, other):
        return self._compared(self.run.equal, other)

    def __ne__(self, other):
        return not self == other

    def __bool__(self):
        raise TypeError("an unknown number is neither true nor false: compare it")

    __radd__, __rmul__ = __add__, __mul__


class Vector:
    """As an annotation: a list of as many unknown numbers as the size under proof."""


class Pair:
    """As an annotation: a list of two unknown numbers, whatever the size."""


def sqrt(x):
    """The square root of an unknown number."""
    return Scalar(x.run.rounded(x.run.root, x.term), x.run)


def identical(a, b):
    """Whether two unknown floats are the same: a NaN is, and 0 and -0 are not."""
    return a.run.decide(a.term == b.term)


class Reals:
    """One run over the real numbers: how its comparisons were answered, and the facts that follow."""

    # The plain solver is quick where facts are linear, the other one strong where they are not.
    solvers = ((z3.SimpleSolver, 100), (lambda: z3.SolverFor("QF_NRA"), 30_000))

    def __init__(self, prescribed):
        self._prescribed = prescribed  # the first answers
        self._answers = []  # all answers
        self._known = {}  # by comparison
        self._roots = {}  # by radicand
        self._facts = []
        self._witness = None  # numbers that meet all facts, if they have been looked for
        self.other_runs = []  # beginnings of answers that are possible, too

    def unknown(self, name):
        return z3.Real(name)

    def term(self, number):
        return number.term if isinstance(number, Scalar) else z3.RealVal(str(Fraction(number)))

    def rounded(self, operation, *terms):
        return operation(*terms)

    def magnitude(self, x):
        return -x if self.decide(x < 0) else x

    def equal(self, a, b):
        return a == b

    def quotient(self, a, b):
        """The q with q b = a. Not z3's own quotient, which is some number even where b is 0."""
        b = z3.simplify(b)
        if self.decide(b == 0):
            raise ZeroDivisionError
        if z3.is_rational_value(b):
            return a / b
        q = z3.FreshReal("quotient")
        self._learn(q * b == a)
        return q

    def root(self, x):
        """The r >= 0 with r r = x; the same r for the same polynomial x."""
        x = z3.simplify(x, som=True)
        if x not in self._roots:
            if self.decide(x < 0):
                raise ValueError("the root of a negative number")
            self._roots[x] = r = z3.FreshReal("root")
            self._learn(z3.And(r >= 0, r * r == x))
        return self._roots[x]

    def decide(self, comparison):
        comparison = z3.simplify(comparison, som=True)
        if z3.is_true(comparison) or z3.is_false(comparison):
            return z3.is_true(comparison)
        if z3.is_not(comparison):
            return not self.decide(comparison.arg(0))
        if comparison not in self._known:
            self._known[comparison] = self._answer(comparison)
        return self._known[comparison]

    def _answer(self, comparison):
        if len(self._answers) < len(self._prescribed):
            answer = self._prescribed[len(self._answers)]
            self._learn(comparison if answer else z3.Not(comparison))
        else:
            answer = z3.is_true(self.witness().eval(comparison, model_completion=True))
            fact, other = (comparison, z3.Not(comparison)) if answer else (z3.Not(comparison), comparison)
            if self._solve(other) is not None:
                self.other_runs.append([*self._answers, not answer])
            self._facts.append(fact)  # the witness meets it
        self._answers.append(answer)
        return answer

    def _learn(self, fact):
        self._facts.append(fact)
        self._witness = None

    def witness(self):
        if self._witness is None:
            self._witness = self._solve()
            assert self._witness is not None, "a run that is not possible"
        return self._witness

    def _solve(self, *more):
        for make_solver, milliseconds in self.solvers:
            solver = make_solver()  # a new one each time, as z3's incremental mode is weak on polynomials
            solver.set("timeout", milliseconds)
            solver.add(*self._facts, *more)
            answer = solver.check()
            if answer != z3.unknown:
                return solver.model() if answer == z3.sat else None
        raise TimeoutError(f"the solver gives up: {solver.reason_unknown()}")


class RoundedReals(Reals):
    """One run over the reals where each operation errs by up to one part in 1/`unit`, an unknown one <= 1/256.

    So it is with floats that neither overflow nor underflow, whatever their precision, from bfloat16 on.
    """

    def __init__(self, prescribed):
        super().__init__(prescribed)
        self.unit = z3.Real("unit")
        self.rounds = True
        self._learn(z3.And(self.unit > 0, self.unit <= z3.Q(1, 256)))

    def rounded(self, operation, *terms):
        result = operation(*terms)
        is_exact = operation is operator.add and any(z3.is_rational_value(t) and t.as_fraction() == 0 for t in terms)
        if is_exact or not self.rounds:
            return result
        error = z3.FreshReal("error")
        self._learn(z3.And(-self.unit <= error, error <= self.unit))
        return result * (1 + error)


@contextlib.contextmanager
def exactly(number):
    """What is computed inside is not rounded; gives the unit of the rounding outside."""
    number.run.rounds = False
    yield Scalar(number.run.unit, number.run)
    number.run.rounds = True


def floats(exponent_bits, significand_bits):
    """Runs over the floats of a format, bit by bit: NaN, infinities, subnormals and both zeros included.

    The significand's leading bit counts: (5, 11) is float16, (8, 8) bfloat16, (8, 24) float32.
    """

    class Floats(Reals):
        solvers = ((lambda: z3.SolverFor("QF_FP"), 30_000),)
        sort = z3.FPSort(exponent_bits, significand_bits)

        def unknown(self, name):
            return z3.FP(name, self.sort)

        def term(self, number):
            return number.term if isinstance(number, Scalar) else z3.FPVal(float(number), self.sort)

        def magnitude(self, x):
            return z3.fpAbs(x)

        def equal(self, a, b):
            return z3.fpEQ(a, b)

        def quotient(self, a, b):
            return a / b

        def root(self, x):
            return z3.fpSqrt(z3.RNE(), x)

    return Floats


def prove(claim, definition, size, numbers=Reals):
    """Raises `Refuted` unless `claim(definition, ...)` holds for all scalars, and all vectors of this size."""
    _, *parameters = inspect.signature(claim).parameters.values()
    lengths = {Vector: size, Pair: 2}
    runs, shown = [[]], False
    while runs:
        run = numbers(runs.pop())

        def unknown(parameter, run=run):
            names = [f"{parameter.name}{i}" for i in range(lengths.get(parameter.annotation, 0))]
            many = [Scalar(run.unknown(name), run) for name in names]
            return many if parameter.annotation in lengths else Scalar(run.unknown(parameter.name), run)

        try:
            holds = claim(definition, *map(unknown, parameters))
            shown = True
        except _Vacuous:
            holds = True
        except (ArithmeticError, ValueError) as error:
            holds = error
        if holds is not True:
            model = run.witness()
            numbers_found = {str(x): model[x] for x in model.decls() if "!" not in x.name()}
            raise Refuted(f"{holds} at {numbers_found}")
        runs += run.other_runs
    assert shown, "no numbers meet the premises"
