"""Steps with drafts: the tokens of plain decoding, a memory at the last draft that counts, and nothing else written.

Logits of a step with drafts differ from those of `decode` by rounding. `ROUNDING` bounds that, as an rms ratio; `CLOSE`
bounds a single logit, and so how close two must lie for their order to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.engine.calls import Lane
from kda_jax.engine.lookup import Lookup
from kda_jax.engine.memory import Layout, Memory, empty_memory
from kda_jax.engine.programs import Programs
from kda_jax.sampling import Sampler, make_sampler
from measure import assert_close
from random_model import random_model, small_config

ROUNDING, CLOSE = 2e-5, 1e-5
PAGE, ROWS, MOST = 16, 4, 7
CONFIG = small_config(model_max_length=256, layers=("kda", "mla", "kda"), mlps=("dense", "moe", "moe"))
LAYOUT = Layout(
    config=CONFIG,
    dtype=jnp.dtype(jnp.float32),
    window_dtype=jnp.dtype(jnp.float32),
    num_slots=ROWS + 1,
    num_pages=16384,  # 16 MB a plane: a copy of one would stand out
    page_rows=PAGE,
    max_tokens=256,
)
Drafts = Callable[["Text", int], Sequence[int]]
"""Guesses for a text, of so many at most."""


@pytest.fixture(scope="module")
def programs() -> Programs:
    """All batches are padded to four rows, which saves compiling others. The embedding is large beside what layers add,
    so that the last token has most of a say in the next, and texts come to repeat themselves."""
    model = random_model(CONFIG)
    model.embed[...] *= 5
    made = Programs(model, LAYOUT, most_tokens=64, most_drafts=MOST)
    made.batches = (ROWS,)
    return made


class Text:
    """A prompt, what was generated, and where its state lies."""

    def __init__(self, number: int, prompt: list[int], sampler: Sampler) -> None:
        self.number, self.tokens, self.length = number, list(prompt), len(prompt)
        self.row = Lane(0, [], 0, sampler, number)
        self.lookup = Lookup(shortest=2)
        self.steps = 0
        self.logits: list[np.ndarray] = []

    @property
    def made(self) -> list[int]:
        return self.tokens[self.length :]

    def take(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """New tokens, and the logits of each."""
        self.tokens += tokens
        self.logits += list(logits)
        self.steps += 1
        self.row = self.row._replace(position=len(self.tokens) - 1)


def nan_memory() -> Memory:
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.full(leaf.shape, np.nan, leaf.dtype)),
        jax.eval_shape(lambda: empty_memory(LAYOUT)),
    )


def begin(programs: Programs, memory: Memory, text: Text, slot: int, pages: list[int]) -> Memory:
    """The text's prompt is read; it gets a slot and all the pages it may need."""
    need = -(-(text.length + 100) // PAGE)
    text.row = text.row._replace(slot=slot, pages=[pages.pop() for _ in range(need)], position=0)
    memory, chosen = programs.prefill(programs.zero(memory, slot), text.tokens, text.row)
    text.take([int(chosen.tokens[0])], np.asarray(chosen.logits))
    return memory


def advance(programs: Programs, memory: Memory, texts: list[Text], drafts: list[list[int]]) -> Memory:
    """A step of some texts, with drafts or with none at all."""
    rows = [text.row for text in texts]
    if not any(drafts):
        memory, chosen = programs.decode(memory, [text.tokens[-1] for text in texts], rows)
        accepted, tokens = [0] * len(texts), np.asarray(chosen.tokens)[:, None]
        logits = np.asarray(chosen.logits)[:, None]
    else:
        given = [[text.tokens[-1], *more] for text, more in zip(texts, drafts, strict=True)]
        memory, verified = programs.verify(memory, given, rows)
        accepted, tokens, logits = (
            np.asarray(x) for x in (verified.accepted, verified.tokens, verified.logits)
        )
    for i, text in enumerate(texts):
        count = int(accepted[i]) + 1
        text.take(tokens[i, :count].tolist(), logits[i, :count])
    return memory


def generate(
    programs: Programs, prompts: list[list[int]], most: int, drafts: Drafts, samplers: list[Sampler]
) -> list[Text]:
    """`most` tokens behind each prompt, up to four texts side by side."""
    memory, pages = (
        nan_memory(),
        np.random.default_rng(0).permutation(np.arange(1, LAYOUT.num_pages)).tolist(),
    )
    waiting = [Text(i, *each) for i, each in enumerate(zip(prompts, samplers, strict=True))]
    done, running, slots = [], [], list(range(1, ROWS + 1))
    while waiting or running:
        while waiting and slots:
            running.append(waiting.pop(0))
            memory = begin(programs, memory, running[-1], slots.pop(), pages)
        guesses = [list(drafts(text, min(MOST, most - len(text.made) - 1))) for text in running]
        memory = advance(programs, memory, running, guesses)
        for text in [text for text in running if len(text.made) >= most]:
            running.remove(text)
            done.append(text)
            slots.append(text.row.slot)
            pages += text.row.pages  # the next text finds in them what this one left
    return sorted(done, key=lambda text: text.number)


def texts(count: int) -> list[list[int]]:
    """Prompts of random tokens, and prompts that say one thing again and again."""
    rng, prompts = np.random.default_rng(0), []
    for i in range(count):
        length = int(rng.integers(3, 60))
        phrase = rng.integers(0, CONFIG.vocab_size, length if i % 2 else rng.integers(1, 9)).tolist()
        prompts.append((phrase * length)[:length])
    return prompts


class Compared(NamedTuple):
    """How many texts are the same, how many change at two close logits, and what drafts came to."""

    same: int
    close: int
    steps: int
    tokens: int


def compare(plain: list[Text], drafted: list[Text]) -> Compared:
    """Holds texts with drafts against plain ones, token by token."""
    close = 0
    for want, got in zip(plain, drafted, strict=True):
        assert len(want.made) == len(got.made)
        same = next((i for i, (a, b) in enumerate(zip(want.made, got.made)) if a != b), len(want.made))
        for a, b in zip(want.logits[:same], got.logits[:same], strict=True):
            assert_close("logits", a, b, ROUNDING)
            assert np.abs(a - b).max() <= CLOSE
        if same < len(want.made):
            assert want.row.sampler == Sampler(), "the random numbers are the same"
            gap = want.logits[same][want.made[same]] - want.logits[same][got.made[same]]
            assert 0 <= gap <= 2 * CLOSE, f"text {want.number} changes at token {same}"
            close += 1
    return Compared(
        len(plain) - close,
        close,
        sum(text.steps for text in drafted),
        sum(len(text.made) for text in drafted),
    )


def none(text: Text, most: int) -> list[int]:
    return []


def looked_up(text: Text, most: int) -> Sequence[int]:
    return text.lookup.propose(np.array(text.tokens, np.int32), most) if most > 0 else ()


def knowing(plain: list[Text], wrong: float) -> Drafts:
    """Guesses of one who knows the plain text, some of them spoilt."""
    rng = np.random.default_rng(1)

    def drafts(text: Text, most: int) -> list[int]:
        known = plain[text.number].made[len(text.made) :][: max(0, int(rng.integers(0, MOST + 1)))][:most]
        return [token if rng.random() >= wrong else int(rng.integers(0, 67)) for token in known]

    return drafts


def test_tokens_are_those_of_plain_decoding(programs: Programs) -> None:
    """104 texts, greedy and at three temperatures, with drafts that are right or wrong, and such that are looked up."""
    prompts, most = texts(104), 12
    warm = [
        make_sampler(temperature=0.7, top_k=30),
        make_sampler(temperature=1.0, top_p=0.9),
        make_sampler(temperature=1.4, min_p=0.02),
    ]
    samplers = [Sampler() if i % 4 else warm[i // 4 % 3] for i in range(len(prompts))]
    plain = generate(programs, prompts, most, none, samplers)
    some = compare(plain, generate(programs, prompts, most, knowing(plain, 0.2), samplers))
    found = compare(plain, generate(programs, prompts, most, looked_up, samplers))
    assert some.close == found.close == 0, "no two logits lie so close here that rounding changes their order"
    assert some.steps < 0.6 * some.tokens and found.steps < found.tokens - 20


def test_a_text_that_repeats_itself_takes_few_steps(programs: Programs) -> None:
    prompts = [[60] * 40, [9, 1, 5]]
    plain = generate(programs, prompts, 100, none, [Sampler()] * 2)
    drafted = generate(programs, prompts, 100, looked_up, [Sampler()] * 2)
    assert compare(plain, drafted).close == 0
    assert drafted[0].steps < 40 < 100 == plain[0].steps


def prepared(programs: Programs, slots: list[int], seed: int = 0) -> tuple[Memory, list[Text]]:
    """Texts of 15, 31 and 42 tokens behind their prefill: the next rows begin a page, fill one, lie inside one."""
    rng, memory = np.random.default_rng(5), nan_memory()
    pages = np.random.default_rng(seed).permutation(np.arange(1, LAYOUT.num_pages)).tolist()
    made = []
    for number, (length, slot) in enumerate(zip([15, 32, 42], slots, strict=True)):
        made.append(Text(number, rng.integers(0, CONFIG.vocab_size, length).tolist(), Sampler()))
        memory = begin(programs, memory, made[-1], slot, pages)
    return memory, made


def state_of(memory: Memory, row: Lane) -> list[np.ndarray]:
    """The row's slot and its live latents."""
    at, pages = np.arange(row.position), np.asarray(row.pages)
    slots = [np.asarray(pool[row.slot]) for pool in (*memory.recurrent, *memory.conv)]
    return slots + [np.asarray(plane)[pages[at // PAGE], at % PAGE] for plane in memory.planes]


def test_the_memory_is_at_the_last_draft_that_counts(programs: Programs) -> None:
    slots = [2, 4, 1]
    memory, plain = prepared(programs, slots)
    for _ in range(MOST + 2):
        memory = advance(programs, memory, plain, [[], [], []])
    right = [text.made[1 : MOST + 1] for text in plain]
    wrong = (right[1][2] + 1) % CONFIG.vocab_size
    drafts = [right[0], [*right[1][:2], wrong, *right[1][3:]], []]
    memory, drafted = prepared(programs, slots)
    before = np.asarray(memory.planes[0])
    memory = advance(programs, memory, drafted, drafts)
    assert [len(text.made) for text in drafted] == [1 + MOST + 1, 1 + 2 + 1, 1 + 1]
    assert all(a.made[: len(b.made)] == b.made for a, b in zip(plain, drafted))

    expected, again = prepared(programs, slots)
    while going := [text for text, other in zip(again, drafted) if len(text.made) < len(other.made)]:
        expected = advance(programs, expected, going, [[]] * len(going))
    for text, other in zip(again, drafted):
        assert text.row == other.row
        for want, got in zip(state_of(expected, text.row), state_of(memory, other.row), strict=True):
            assert_close("state", want, got, ROUNDING)
    for pool in (*memory.recurrent, *memory.conv):
        assert np.isnan(np.asarray(pool)[[0, 3]]).all(), "slots of nobody"
    may = np.zeros(before.shape[:2], bool)
    may[0] = True
    for text, more in zip(drafted, drafts):
        at = len(text.tokens) - len(text.made) + np.arange(len(more) + 1)
        may[np.asarray(text.row.pages)[at // PAGE], at % PAGE] = True
    np.testing.assert_array_equal(before[~may], np.asarray(memory.planes[0])[~may])

    # A checkpoint here holds no row of a draft that does not count, and nothing behind reads one.
    row = drafted[1].row
    saved = [page for page in range(1, 99) if all(page not in text.row.pages for text in drafted)]
    saved = saved[: LAYOUT.snapshot_pages(row.position)]
    assert row.position % PAGE
    memory = programs.snapshot(memory, row, saved)
    for plane in memory.planes:
        assert not np.asarray(plane[saved[-1], row.position % PAGE :]).any()
    for _ in range(5):
        memory = advance(programs, memory, drafted, [[], [], []])
    for text, other in zip(plain, drafted):
        count = min(len(text.made), len(other.made))
        assert text.made[:count] == other.made[:count]


def test_a_row_has_the_bits_that_it_has_beside_others(programs: Programs) -> None:
    """In another order, other slots and pages, beside other drafts, and with fewer or other drafts behind."""
    memory, first = prepared(programs, [2, 4, 1])
    drafts = [[5, 6, 7, 8, 9], [1] * 7, []]
    given = [[text.tokens[-1], *more] for text, more in zip(first, drafts)]
    memory, want = programs.verify(memory, given, [text.row for text in first])
    other_memory, other = prepared(programs, [3, 1, 2], seed=1)
    given = [[*given[2], 3, 3], [*given[1][:5], 2, 2], given[0][:3]]
    other_memory, got = programs.verify(other_memory, given, [other[i].row for i in (2, 1, 0)])
    for number, same in [(0, 3), (1, 5), (2, 1)]:
        a, b = (np.asarray(x.logits)[i, :same] for x, i in ((want, number), (got, 2 - number)))
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    accepted = np.asarray(want.accepted)[:3], np.asarray(got.accepted)[2::-1]
    assert (accepted[0] == 0).all() and (accepted[1] == 0).all()
    for text, another in zip(first, other):
        for a, b in zip(state_of(memory, text.row), state_of(other_memory, another.row), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("width", [4, 8])
def test_pools_are_written_in_place(programs: Programs, width: int) -> None:
    """No program holds as much as a quarter of a plane besides its arguments."""
    analysis = programs.compiled("verify", ROWS, width).memory_analysis()
    assert analysis is not None
    plane = LAYOUT.num_pages * LAYOUT.page_nbytes // LAYOUT.num_planes
    assert analysis.temp_size_in_bytes < plane // 4
    assert analysis.alias_size_in_bytes >= LAYOUT.nbytes


@pytest.mark.parametrize(
    ("most", "widths"), [(0, ()), (1, (2,)), (3, (4,)), (7, (4, 8)), (10, (4, 8, 11))], ids=str
)
def test_every_width_is_compiled_at_start(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, most: int, widths: tuple[int, ...]
) -> None:
    made = Programs((programs.graphdef, programs.params), LAYOUT, most_drafts=most)
    names: list[tuple[str, int, int]] = []
    monkeypatch.setattr(made, "compiled", lambda *name: names.append(name))
    made.compile_all()
    verified = [name[1:] for name in names if name[0] == "verify"]
    assert verified == [(size, width) for size in (1, 2, 4) for width in widths]


@pytest.mark.parametrize(
    ("tokens", "rows", "match"),
    [
        ([[1] * 9], [Lane(1, [5], 3)], r"a token and up to 7 drafts a row, got \[9\] tokens"),
        ([[]], [Lane(1, [5], 3)], r"got \[0\] tokens"),
        ([[1, 2]], [Lane(1, [5], 15)], "room for 17 tokens, got slot 1 and 1 pages"),
        ([[1], [1]], [Lane(1, [5], 3), Lane(1, [6], 3)], "verify takes 1..4 rows, each in a slot of its own"),
        ([[1], [1]], [Lane(1, [5], 3)], "verify takes 1..4 rows"),
    ],
    ids=["many drafts", "no token", "no room", "slot twice", "rows"],
)
def test_refuses_what_does_not_fit(programs: Programs, tokens: Any, rows: list[Lane], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        programs.verify(Memory((), (), ()), tokens, rows)


def test_refuses_drafts_where_none_may_be(programs: Programs) -> None:
    without = Programs((programs.graphdef, programs.params), LAYOUT)
    with pytest.raises(ValueError, match="up to 0 drafts a row, got"):
        without.verify(Memory((), (), ()), [[1, 2]], [Lane(1, [5], 3)])
    with pytest.raises(ValueError, match="most_drafts=-1 not negative"):
        Programs((programs.graphdef, programs.params), LAYOUT, most_drafts=-1)
