"""D5 and the chain of block hashes: from tokens, from an engine's hashes, with extras."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keys_support import layout, namespace

from tierkv.errors import IdentityError
from tierkv.keys import Adapter, Encodable, Extras, MultimodalItem, canonical

ROOT = Path(__file__).parent.parent
BS = 16
PROMPT = list(range(1000, 1000 + 5 * BS))
ENGINE = "test-sha256"


# ---- the same in every process


def pythons() -> list[str]:
    """Interpreters of the versions that tierkv supports, as far as this machine has them."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for minor in (11, 12, 13):
        for folder in sorted(versions.glob(f"3.{minor}.*")):
            if (folder / "bin/python").exists():
                found.setdefault(f"3.{minor}", str(folder / "bin/python"))
    return list(found.values())


PRINT_KEYS = (
    "from keys_support import namespace\n"
    "from tierkv.keys import Adapter, Extras, MultimodalItem\n"
    "extras = Extras(Adapter('ä', 'r'), (MultimodalItem('h', 17), MultimodalItem(b'h', 40)), 'embeds', 'salt')\n"
    "space = namespace(salt='tenant')\n"
    "for chain in (space.chain(list(range(80))), space.chain(list(range(80)), extras=extras)):\n"
    "    print(*[space.block_key(each, 1).hex() for each in chain.hashes])\n"
    "space = namespace(salt='tenant', hash_scheme='x')\n"
    "chain = space.chain(engine_hashes=[bytes([i]) * 20 for i in range(4)], extras=extras)\n"
    "print(*[space.block_key(each, 1).hex() for each in chain.hashes])\n"
)


@pytest.mark.parametrize("seed", [None, "0", "1", "random"])
def test_d5_the_same_key_in_every_process(seed: str | None) -> None:
    """Plain lists of tokens need nothing that is not in the standard library, so a bare interpreter can take part."""
    printed = {}
    for python in pythons():
        env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [python, "-c", PRINT_KEYS], env=env, capture_output=True, text=True, check=True, timeout=60
        )
        printed[python] = done.stdout
    here: dict[str, Any] = {}
    lines: list[str] = []
    exec(PRINT_KEYS, here | {"print": lambda *words: lines.append(" ".join(words))})
    assert len(lines) == 3
    assert set(printed.values()) == {"".join(f"{line}\n" for line in lines)}
    if len(printed) < 2:
        pytest.skip("one Python version here: the seeds were compared, the versions were not")


# Digests that were worked out once. They change only together with FORMAT_VERSION.


def test_d5_golden_namespace() -> None:
    space = namespace()
    assert space.digest.hex() == "f035ef5dca28f3842d75ab00ed8e62904a1452b15328615ca7bd49a0edc2e366"
    assert space.root.hex() == "aae24233efa8f43e53722d27e67128d493d8248324f4906c564a9e231eadac17"
    assert space.prefix.hex() == "3e757e3af035ef5dca28f384"


def test_d5_golden_chain() -> None:
    space = namespace(salt="tenant")
    chain = space.chain(PROMPT[: 2 * BS])
    assert [each.hex() for each in chain.hashes] == [
        "ff05463110c4a8ce9d9309b79ff543dfed7a8b32055b690a936ce174d6ec5ad7",
        "50f70ab0066f1673dd7f3232166a76d6f0b05851070f2d1a147db0856d4ab89f",
    ]
    assert (
        space.block_key(chain.hashes[1], 1).hex()
        == "ceb6192149d9d1ed483cface4704eb6239300a9e9273902e49c5bc4255665bae"
    )


def test_d5_golden_extras() -> None:
    extras = Extras(Adapter("poet", "r1"), (MultimodalItem("image", 20),), b"embeds", "salt")
    assert (
        namespace().chain(PROMPT[: 2 * BS], extras=extras).hashes[1].hex()
        == "4db06ccb0c9bffee6328b1d1cae1a8bf5245c7bddc4a216bb9b2ab1f1776f70a"
    )
    scheme = namespace(hash_scheme=ENGINE)
    chain = scheme.chain(engine_hashes=engine_hashes(2), extras=extras)
    assert chain.hashes[1].hex() == "224387a07f0683ae16f9ff71e1a8016997a755baf5f06328f8a5192884f99f89"


def test_the_chain_is_what_the_docs_say() -> None:
    space = namespace()
    previous = space.root
    for number, found in enumerate(space.chain(PROMPT).hashes):
        raw = np.array(PROMPT[number * BS : (number + 1) * BS], dtype="<i4").tobytes()
        previous = hashlib.sha256(previous + raw).digest()
        assert found == previous


# ---- tokens


def test_d5_a_pair_that_fools_polynomial_hashes() -> None:
    space = namespace()
    for at in range(BS - 1):
        other = PROMPT.copy()
        other[at] += 31
        other[at + 1] -= 1
        assert not set(space.chain(PROMPT).hashes) & set(space.chain(other).hashes)


@given(at=st.integers(0, len(PROMPT) - 1), change=st.integers(1, 2**31 - 1 - 2000))
def test_d5_one_other_token_parts_the_chains_for_good(at: int, change: int) -> None:
    other = PROMPT.copy()
    other[at] += change
    one, two = namespace().chain(PROMPT).hashes, namespace().chain(other).hashes
    assert [a == b for a, b in zip(one, two, strict=True)] == [i < at // BS for i in range(5)]


@pytest.mark.parametrize("length", [0, 1, BS - 1, BS, BS + 1, 3 * BS, 3 * BS + 1])
def test_only_full_blocks_have_a_hash(length: int) -> None:
    chain = namespace().chain(PROMPT[:length])
    assert len(chain) == length // BS
    assert chain.num_tokens == length
    assert chain.hashes == namespace().chain(PROMPT).hashes[: length // BS]
    assert chain.uncacheable is None


@pytest.mark.parametrize("length", [0, 3, 4 * BS - 1, 4 * BS, 4 * BS + 1])
def test_blocks_of_four_engine_blocks(length: int) -> None:
    chain = namespace(layout=layout(engine_blocks=4)).chain(PROMPT[:length])
    assert len(chain) == length // (4 * BS)


def test_parents() -> None:
    chain = namespace().chain(PROMPT)
    assert [chain.parent_of(i) for i in range(3)] == [None, chain.hashes[0], chain.hashes[1]]


FORMS: list[Any] = [
    tuple,
    lambda tokens: np.array(tokens, dtype=np.int32),
    lambda tokens: np.array(tokens, dtype=np.int64),
    lambda tokens: np.array(tokens, dtype=np.uint16),
    lambda tokens: np.array(tokens, dtype=">i4"),
    lambda tokens: np.array([tokens, tokens], dtype=np.int32).T[:, 0],  # not contiguous
    lambda tokens: range(tokens[0], tokens[-1] + 1),
]


@pytest.mark.parametrize("form", FORMS)
def test_d5_the_container_does_not_matter(form: Any) -> None:
    assert namespace().chain(form(PROMPT)).hashes == namespace().chain(PROMPT).hashes


@pytest.mark.parametrize("token", [-(2**31), -1, 0, 2**31 - 1])
def test_ids_up_to_int32_are_taken(token: int) -> None:
    tokens = [token] * BS
    as_list, as_array = (
        namespace().chain(form).hashes for form in (tokens, np.array(tokens, dtype=np.int64))
    )
    assert as_list == as_array
    assert len(as_list) == 1


WRONG_TOKENS: list[Any] = [
    [2**31],
    [-(2**31) - 1],
    [2**70],
    [1.0],
    ["1"],
    [[1, 2], [3, 4]],
    [None],
    np.array([2**31]),
    np.array([-(2**31) - 1]),
    np.array([2**63], dtype=np.uint64),
    np.array([1.0]),
    np.array([[1, 2], [3, 4]]),
    np.array([True, False]),
]


@pytest.mark.parametrize("tokens", WRONG_TOKENS, ids=repr)
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(IdentityError, match="tokens: "):
        namespace().chain(tokens)


def test_nothing_is_a_prompt_without_blocks() -> None:
    for nothing in ([], (), np.array([]), np.array([], dtype=np.int32)):
        assert namespace().chain(nothing).hashes == ()


def test_arguments_that_contradict_each_other_are_refused() -> None:
    tokens, hashes = namespace(), namespace(hash_scheme=ENGINE)
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (tokens, {}, "give either tokens or engine_hashes"),
        (tokens, {"tokens": [1], "engine_hashes": [bytes(32)]}, "give either tokens or engine_hashes"),
        (tokens, {"engine_hashes": [bytes(32)]}, "hash_scheme = 'tokens'"),
        (tokens, {"tokens": [1, 2], "num_tokens": 3}, "num_tokens = 3: 2 tokens were given"),
        (hashes, {"tokens": [1]}, f"hash_scheme = '{ENGINE}': this namespace takes engine_hashes"),
        (
            hashes,
            {"engine_hashes": [bytes(32)] * 2, "num_tokens": 31},
            "num_tokens = 31: 2 hashes cover 32 tokens",
        ),
        (hashes, {"engine_hashes": [bytes(15)]}, "engine hash 0 has 15 bytes; 16 to 64 are taken"),
        (hashes, {"engine_hashes": [bytes(16), bytes(65)]}, "engine hash 1 has 65 bytes"),
        (hashes, {"engine_hashes": ["a" * 32]}, "engine hash 0 is str, not bytes"),
        (hashes, {"engine_hashes": [17]}, "engine hash 0 is int, not bytes"),
    ]
    for space, arguments, message in calls:
        with pytest.raises(IdentityError, match=message):
            space.chain(**arguments)


# ---- extras in a chain of tokens


def parted(one: Sequence[bytes], other: Sequence[bytes]) -> list[bool]:
    return [a != b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    ("offset", "first"), [(0, 0), (15, 0), (16, 1), (17, 1), (40, 2), (79, 4), (80, 5), (500, 5)]
)
def test_an_image_parts_the_chain_from_its_block_on(offset: int, first: int) -> None:
    space = namespace()
    plain = space.chain(PROMPT).hashes
    image = space.chain(PROMPT, extras=Extras(multimodal=(MultimodalItem("image", offset),))).hashes
    assert parted(plain, image) == [i >= first for i in range(5)]


def chain_with(*items: MultimodalItem) -> Sequence[bytes]:
    return namespace().chain(PROMPT, extras=Extras(multimodal=items)).hashes


def test_images_are_told_apart_by_content_offset_and_type() -> None:
    items = [
        MultimodalItem("image", 20),
        MultimodalItem("image", 21),
        MultimodalItem("images", 20),
        MultimodalItem(b"image", 20),
        MultimodalItem("x" * 200, 20),
        MultimodalItem("x" * 199 + "y", 20),
    ]
    assert len({chain_with(item)[1] for item in items}) == len(items)
    assert len({chain_with(item)[4] for item in items}) == len(items)
    assert len({chain_with(item)[0] for item in items}) == 1


def test_the_order_in_which_images_are_told_does_not_matter() -> None:
    a, b = MultimodalItem("a", 3), MultimodalItem("b", 50)
    assert chain_with(a, b) == chain_with(b, a)
    assert chain_with(a, b)[0] == chain_with(a)[0]
    assert parted(chain_with(a, b), chain_with(a)) == [False, False, False, True, True]


def test_an_offset_may_be_a_numpy_integer() -> None:
    assert chain_with(MultimodalItem("a", np.int64(20))) == chain_with(MultimodalItem("a", 20))  # type: ignore[arg-type]


def test_each_kind_of_extra_is_its_own() -> None:
    kinds = [
        Extras(),
        Extras(adapter=Adapter("x", "x")),
        Extras(prompt_embeds_hash="x"),
        Extras(prompt_embeds_hash=b"x"),
        Extras(cache_salt="x"),
        Extras(multimodal=(MultimodalItem("x", 0),)),
        Extras(prompt_embeds_hash="x", cache_salt="x"),
    ]
    for block in range(5):
        assert len({namespace().chain(PROMPT, extras=extras).hashes[block] for extras in kinds}) == len(kinds)


# ---- engine hashes


def engine_hashes(count: int, *, size: int = 32, salt: int = 0) -> list[bytes]:
    return [hashlib.sha512(bytes([salt, i])).digest()[:size] for i in range(count)]


def test_an_engines_own_digests_are_the_block_hashes() -> None:
    space = namespace(hash_scheme=ENGINE)
    chain = space.chain(engine_hashes=engine_hashes(3))
    assert list(chain.hashes) == engine_hashes(3)
    assert chain.num_tokens == 48


@pytest.mark.parametrize("size", [16, 20, 31, 33, 64])
def test_engine_hashes_of_another_size_are_digested(size: int) -> None:
    chain = namespace(hash_scheme=ENGINE).chain(engine_hashes=engine_hashes(3, size=size))
    assert [len(each) for each in chain.hashes] == [32] * 3
    assert (
        len({*chain.hashes, *namespace(hash_scheme=ENGINE).chain(engine_hashes=engine_hashes(3)).hashes}) == 6
    )


@pytest.mark.parametrize("count", range(10))
def test_a_block_of_four_has_the_hash_of_its_last_engine_block(count: int) -> None:
    space = namespace(hash_scheme=ENGINE, layout=layout(engine_blocks=4))
    given = engine_hashes(count)
    chain = space.chain(engine_hashes=given, num_tokens=count * BS + 5)
    assert list(chain.hashes) == given[3::4]
    assert chain.num_tokens == count * BS + 5


@pytest.mark.parametrize("n", [1, 4])
def test_the_running_digest_separates_all_blocks_after_an_extra(n: int) -> None:
    """The engine's hash may forget what an early block depended on; the chain does not."""
    space = namespace(hash_scheme=ENGINE, layout=layout(engine_blocks=n))
    given = engine_hashes(6 * n + n // 2)
    tokens = n * BS

    def with_items(*items: MultimodalItem) -> Sequence[bytes]:
        return space.chain(engine_hashes=given, extras=Extras(multimodal=items)).hashes

    plain = space.chain(engine_hashes=given).hashes
    assert len(plain) == 6
    early = with_items(MultimodalItem("a", tokens + 1))
    assert parted(plain, early) == [False, True, True, True, True, True]
    other = with_items(MultimodalItem("b", tokens + 1))
    assert parted(early, other) == [False, True, True, True, True, True]
    # The same later image after different early ones.
    both = [
        with_items(MultimodalItem(first, tokens), MultimodalItem("late", 4 * tokens)) for first in ("a", "b")
    ]
    assert parted(*both) == [False, True, True, True, True, True]
    # An image that moved on within its block, and the order of two.
    assert parted(early, with_items(MultimodalItem("a", tokens + 2)))[1:] == [True] * 5
    swapped = [
        with_items(MultimodalItem(one, tokens), MultimodalItem(two, 3 * tokens)) for one, two in ("ab", "ba")
    ]
    assert parted(*swapped) == [False, True, True, True, True, True]


def test_d2_a_revision_that_the_engines_hash_forgets_is_in_the_key() -> None:
    space = namespace(hash_scheme=ENGINE)
    chains = [
        space.chain(engine_hashes=engine_hashes(3), extras=Extras(adapter=Adapter("a", revision))).hashes
        for revision in ("1", "2")
    ]
    assert not set(chains[0]) & set(chains[1])


def test_an_engine_hash_beyond_the_cacheable_part_is_not_looked_at() -> None:
    extras = Extras(multimodal=(MultimodalItem(None, 16),))
    chain = namespace(hash_scheme=ENGINE).chain(engine_hashes=[bytes(32), b"short"], extras=extras)
    assert len(chain) == 1
    assert chain.uncacheable == "the multimodal item at token 16 has no content hash"


# ---- the encoding

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=()))  # lone surrogates too
    | st.binary()
)
VALUES: st.SearchStrategy[Encodable] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12
)


def typed(value: Encodable) -> object:
    """The value with its types, so that True is not 1."""
    return (tuple, tuple(map(typed, value))) if isinstance(value, tuple) else (type(value), value)


@given(one=VALUES, other=VALUES)
def test_d5_canonical_is_injective(one: Encodable, other: Encodable) -> None:
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


def decoded(raw: bytes) -> tuple[Encodable, bytes]:
    """Turns an encoding back: that this can be done is what injective means."""
    size = int.from_bytes(raw[1:9], "big")
    body, rest = raw[9 : 9 + size], raw[9 + size :]
    assert len(body) == size
    match raw[:1]:
        case b"n":
            return None, rest
        case b"b":
            return bool(body[0]), rest
        case b"i":
            return int.from_bytes(body, "big", signed=True), rest
        case b"s":
            return body.decode("utf-8", "surrogatepass"), rest
        case b"y":
            return body, rest
    values: list[Encodable] = []
    while body:
        value, body = decoded(body)
        values.append(value)
    return tuple(values), rest


@given(value=VALUES)
def test_d5_canonical_can_be_turned_back(value: Encodable) -> None:
    back, rest = decoded(canonical(value))
    assert rest == b""
    assert typed(back) == typed(value)


def test_d5_neighbours_do_not_run_into_each_other() -> None:
    alike: list[tuple[Encodable, Encodable]] = [
        (("ab", "c"), ("a", "bc")),
        (("a", ("b", "c")), ("a", "b", "c")),
        ((), None),
        (("",), ()),
        ((1,), (True,)),
        ((0,), (False,)),
        (("1",), (1,)),
        ((b"a",), ("a",)),
        ((None, "a"), ("a", None)),
        ((255,), (-1,)),
    ]
    for one, other in alike:
        assert canonical(one) != canonical(other)


@pytest.mark.parametrize("value", [1.0, [1], {"a": 1}, {1}, object(), bytearray(b"a"), np.int64(1)])
def test_d5_other_types_have_no_encoding(value: Any) -> None:
    with pytest.raises(IdentityError, match="has no canonical encoding"):
        canonical(value)
    with pytest.raises(IdentityError, match="has no canonical encoding"):
        canonical(("nested", value))
