"""Join codes: what people do to them, and what they are told."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import InvalidArgumentError, InvalidKeyError, JoinCodeError
from ringfort.identity import base32, typos
from ringfort.identity.join_codes import decode, encode
from ringfort.identity.namespace import NetworkNamespace

SECRET = bytes(range(100, 132))
CODE = encode("default", SECRET)
LETTERS = CODE.removeprefix("ringfort-default-").replace("-", "")

NAMES = (
    st.lists(st.text("abcuz019", min_size=1, max_size=16), min_size=1, max_size=4)
    .map("-".join)
    .filter(typos.NAME.match)
)
SECRETS = st.binary(min_size=32, max_size=32)


def with_letters(letters: str, name: str = "default") -> str:
    return f"ringfort-{name}-{base32.grouped(letters)}"


def fault(text: str) -> JoinCodeError:
    with pytest.raises(JoinCodeError) as caught:
        decode(text)
    return caught.value


# --- there and back ---------------------------------------------------------------------------------------------------


@given(name=NAMES, secret=SECRETS)
def test_what_was_encoded_is_decoded(name: str, secret: bytes) -> None:
    assert decode(encode(name, secret)) == (name, secret)


def test_a_code_is_fifteen_groups_of_four_after_the_name() -> None:
    groups = CODE.removeprefix("ringfort-default-").split("-")
    assert [len(group) for group in groups] == [4] * 15


def test_the_form_is_frozen() -> None:
    # Codes are written down. If this fails, every code that anyone has is void: raise the version instead.
    assert encode("default", bytes(32)) == f"ringfort-default-1600-{'0000-' * 12}00yz-v7ah"


@pytest.mark.parametrize(
    "text",
    [
        CODE.upper(),
        CODE.replace("-", " "),
        f"  {CODE}\n",
        "ringfort-default-" + LETTERS,
        "ringfort default " + LETTERS.upper(),
        CODE.replace("-", "\u2011"),
        CODE.replace("-", " - "),
        CODE.replace("0", "o"),
        CODE.replace("1", "l"),
        CODE.replace("1", "I").replace("0", "O"),
        "ringfortdefault" + LETTERS,
    ],
    ids=ascii,
)
def test_what_does_not_matter_is_ignored(text: str) -> None:
    assert decode(text) == ("default", SECRET)


def test_the_checksum_is_that_of_bech32m() -> None:
    # BIP 350's own example "abcdef1l7aum6echk45nj3s0wdvt2fg8x9yrzpqzd3ryx", in the symbols of its alphabet.
    alphabet = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
    symbols = [alphabet.index(letter) for letter in "l7aum6echk45nj3s0wdvt2fg8x9yrzpqzd3ryx"]
    assert base32.residue("abcdef", symbols) == 0
    assert base32.checksum("abcdef", symbols[:-6]) == symbols[-6:]


# --- slips ------------------------------------------------------------------------------------------------------------


def test_every_single_wrong_letter_is_found_in_its_place() -> None:
    for place, right in enumerate(LETTERS):
        group = place // 4 + 1
        meant = LETTERS[(group - 1) * 4 : group * 4]
        for wrong in base32.ALPHABET:
            if wrong != right:
                error = fault(with_letters(LETTERS[:place] + wrong + LETTERS[place + 1 :]))
                assert error.group == group
                assert str(error).endswith(f"did you mean {meant!r}?")


def test_every_two_neighbours_that_are_swapped_are_found_in_their_place() -> None:
    swaps = 0
    for place in range(len(LETTERS) - 1):
        first, second = LETTERS[place : place + 2]
        if first != second:
            swaps += 1
            error = fault(with_letters(LETTERS[:place] + second + first + LETTERS[place + 2 :]))
            assert error.group == place // 4 + 1
            assert "swapped" in str(error)
    assert swaps > 40


def test_every_missing_letter_is_found_in_its_group() -> None:
    for place in range(len(LETTERS)):
        error = fault("ringfort-default-" + LETTERS[:place] + LETTERS[place + 1 :])
        # In a run of one letter any of them may be the missing one.
        run = place
        while run and LETTERS[run - 1] == LETTERS[place]:
            run -= 1
        assert error.group in {run // 4 + 1, place // 4 + 1}
        assert "a letter is missing" in str(error)


def test_every_letter_too_many_is_found_near_its_place() -> None:
    for place in range(len(LETTERS) + 1):
        error = fault("ringfort-default-" + LETTERS[:place] + "z" + LETTERS[place:])
        assert "remove a letter: 'z'" in str(error)
        assert error.group is not None
        assert abs(error.group - (place // 4 + 1)) <= 1


def test_a_group_that_was_typed_twice_is_found() -> None:
    for group in range(15):
        groups = [LETTERS[at : at + 4] for at in range(0, 60, 4)]
        groups.insert(group, groups[group])
        error = fault(f"ringfort-default-{'-'.join(groups)}")
        assert "remove a whole group" in str(error)
        assert error.group == group + 1


@pytest.mark.parametrize("group", range(1, 15))
def test_a_missing_group_is_counted(group: int) -> None:
    groups = [LETTERS[at : at + 4] for at in range(0, 60, 4)]
    del groups[group]
    assert "it has 14 groups of four after the name 'default'; a whole code has 15" in str(
        fault(f"ringfort-default-{'-'.join(groups)}")
    )


def test_a_letter_that_no_code_has_is_found_with_what_belongs_there() -> None:
    error = fault(with_letters(LETTERS[:17] + "u" + LETTERS[18:]))
    assert error.group == 5
    assert str(error).endswith(f"did you mean {LETTERS[16:20]!r}?")


def test_several_letters_that_no_code_has_are_named_with_their_groups() -> None:
    error = fault(with_letters("u" + LETTERS[1:30] + "!" + LETTERS[31:]))
    assert "groups 1, 8: '!' 'u'" in str(error)


@pytest.mark.parametrize(
    "name", ["defualt", "defaut", "defaullt", "default1", "defauit", "de-fault", "efault", "defau!t"]
)
def test_a_slip_in_the_name_is_found(name: str) -> None:
    assert f"the name {name!r}: did you mean 'default'?" in str(fault(with_letters(LETTERS, name)))


def test_a_dash_that_is_missing_in_a_name_is_found() -> None:
    code = encode("my-lab", SECRET).replace("my-lab", "mylab")
    assert "the name 'mylab': did you mean 'my-lab'?" in str(fault(code))


@pytest.mark.parametrize("name", ["u", "menu", "home", "a-b-c", "x" * 32, "1234-5678"])
def test_slips_are_found_under_any_name(name: str) -> None:
    code = encode(name, SECRET)
    assert fault(code[:-1]).group == 15
    changed = "z" if code[-2] != "z" else "y"
    assert fault(code[:-2] + changed + code[-1]).group == 15
    assert "it has 14 groups" in str(fault(code[:-5]))


def test_a_code_of_another_cluster_is_not_taken_under_this_name() -> None:
    assert isinstance(fault(encode("office", SECRET).replace("office", "garden")), JoinCodeError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with ringfort-"),
        ("k7qf-3m2x", "must begin with ringfort-"),
        ("x" * 5000, "must begin with ringfort-"),
        ("ringfort-" * 1000, "must begin with ringfort-"),
        ("ringfort", "too short"),
        ("ringfort-default", "too short"),
        ("ringfort-" + LETTERS, "too short"),
        (with_letters(LETTERS, "x" * 40), "too long"),
        (with_letters(LETTERS[::-1]), "more than one letter is wrong"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_code_at_all_is_said_so(text: str, words: str) -> None:
    assert words in str(fault(text))


def test_a_code_of_another_version_is_said_to_be_one() -> None:
    symbols = [2, 6, *base32.to_symbols(SECRET)]
    code = with_letters(base32.to_text([*symbols, *base32.checksum("default", symbols)]))
    assert "another version" in str(fault(code))


def test_bits_that_belong_to_nothing_are_refused() -> None:
    symbols = [1, 6, *base32.to_symbols(SECRET)]
    symbols[-1] |= 1
    code = with_letters(base32.to_text([*symbols, *base32.checksum("default", symbols)]))
    assert "not made by ringfort" in str(fault(code))


@settings(max_examples=30)
@given(secret=SECRETS, seed=st.integers(0, 2**32))
def test_several_wrong_letters_are_never_taken_for_a_code(secret: bytes, seed: int) -> None:
    source = random.Random(seed)
    code = encode("default", secret)
    letters = list(code.removeprefix("ringfort-default-").replace("-", ""))
    for place in source.sample(range(60), source.randint(2, 20)):
        letters[place] = source.choice([letter for letter in base32.ALPHABET if letter != letters[place]])
    fault(with_letters("".join(letters)))


@given(text=st.text(max_size=200) | st.text("ringfort-abcuol019 ", max_size=120).map("ringfort-".__add__))
def test_any_text_is_refused_with_a_join_code_error_and_nothing_else(text: str) -> None:
    fault(text)


# --- what an error may show -------------------------------------------------------------------------------------------


@given(secret=SECRETS, place=st.integers(0, 59), kind=st.sampled_from(["wrong", "strange", "missing", "double", "cut"]))
def test_an_error_shows_at_most_one_group_of_the_code(secret: bytes, place: int, kind: str) -> None:
    code = encode("default", secret)
    letters = code.removeprefix("ringfort-default-").replace("-", "")
    spoilt = {
        "wrong": letters[:place] + ("z" if letters[place] != "z" else "y") + letters[place + 1 :],
        "strange": letters[:place] + "u" + letters[place + 1 :],
        "missing": letters[:place] + letters[place + 1 :],
        "double": letters[:place] + letters[place] + letters[place:],
        "cut": letters[: 4 * (place // 4)],
    }[kind]
    error = fault("ringfort-default-" + spoilt)
    shown = str(error)
    assert not [at for at in range(56) if letters[at : at + 5] in shown]
    assert error.value is None
    assert error.__cause__ is None


def test_the_error_says_which_setting_the_code_came_from() -> None:
    with pytest.raises(JoinCodeError, match=r"^RINGFORT_KEY: "):
        decode("nonsense", source="RINGFORT_KEY")


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 33, "Lab", "a_b", "a b", "-a", "a-", "a--b", "..", "a/b", "ä", "a\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must have 1 to 32"):
        NetworkNamespace(name, SECRET)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_secret_of_another_size_is_refused_without_showing_it(size: int) -> None:
    with pytest.raises(InvalidKeyError, match=f"^secret: must have 32 bytes, not {size}$"):
        NetworkNamespace("default", b"\xab" * size)
