"""Where the file of a key lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.store.file.names import FLAT, LONGEST_NAME, place_of

TEXT = st.text(st.sampled_from(["a", "/", "-", "_", ".", "%", "+", "ж", "\0", "\udcff"]), max_size=12)


def test_a_bucket_is_a_directory_and_the_rest_is_percent_encoded_as_the_original_does() -> None:
    place = place_of("v1/instances/my-ns/backend/generate/2863_bb")
    assert place == (("v1", "instances"), "my%2Dns%2Fbackend%2Fgenerate%2F2863%5Fbb")
    assert place_of("v1/event_channels/a/b") == (("v1", "event_channels"), "a%2Fb")


def test_a_leading_slash_belongs_to_the_first_directory() -> None:
    assert place_of("/services/box/backend/1f") == (("%2Fservices", "box"), "backend%2F1f")
    assert place_of("/dynaplan/identity") == ((FLAT,), "%2Fdynaplan%2Fidentity")


def test_a_key_of_less_than_three_parts_is_in_a_directory_of_its_own() -> None:
    assert place_of("a/b") == ((FLAT,), "a%2Fb")
    assert place_of("a//b") == ((FLAT,), "a%2F%2Fb")


def test_no_directory_is_hidden_or_leads_up() -> None:
    assert place_of("../.dynaplan/log") == (("%2E.", "%2Edynaplan"), "log")
    assert place_of("v1/./x") == (("v1", "%2E"), "x")


def test_a_name_that_no_file_system_takes_is_cut_and_stays_one_of_a_kind() -> None:
    one, other = (place_of(f"v1/b/{'ж' * 300}{end}")[1] for end in "xy")
    assert one != other
    assert len(one) == len(other) == LONGEST_NAME


@given(TEXT, TEXT)
def test_no_two_keys_have_the_same_place_and_no_file_lies_where_a_directory_must(
    one: str, other: str
) -> None:
    directories, name = place_of(one)
    assert all(part and "/" not in part and "\0" not in part for part in (*directories, name)) or not one
    if one != other:
        path, another = ("/".join((*each[0], each[1])) for each in (place_of(one), place_of(other)))
        assert path != another
        assert not another.startswith(f"{path}/")
