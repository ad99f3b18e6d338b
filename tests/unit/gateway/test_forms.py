"""A form is passed on as it came; what two readers could understand differently is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.gateway.forms import MAX_PARTS, read_form
from dynaplan.gateway.openai_api import API_PATHS, ApiError

TRANSCRIPTIONS = API_PATHS["/v1/audio/transcriptions"]
TYPE = "multipart/form-data; boundary=xYz"


def form(*parts: tuple[str, bytes], end: bytes = b"--xYz--\r\n") -> bytes:
    pieces = [
        b"--xYz\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    ]
    return b"".join(pieces) + end


MODEL, FILE = ('name="model"', b"whisper"), ('name="file"; filename="a.wav"', b"RIFF\r\n--x\x00\xff")


def test_the_models_name_and_the_texts_are_read_and_the_body_stays() -> None:
    body = form(FILE, MODEL, ('name="language"', "dé".encode()), *[('name="x[]"', b"1")] * 2)
    call = read_form(TRANSCRIPTIONS, TYPE, body)
    assert (call.model, call.body, call.prompt_tokens) == ("whisper", body, 0)
    assert call.document == {"file": "a.wav", "model": "whisper", "language": "dé", "x[]": "1"}
    assert call.has_media
    assert not call.is_stream
    assert not call.can_be_remote
    assert call.content_type == 'multipart/form-data; boundary="xYz"'


@pytest.mark.parametrize(
    ("content_type", "body", "fault"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", form(MODEL, FILE), "boundary"),
        ('multipart/form-data; boundary="a\r\nX-Evil: 1"', form(MODEL, FILE), "not whole"),
        ('multipart/form-data; boundary="a;b"', form(MODEL, FILE), "boundary"),
        (TYPE, form(FILE), "'model'"),
        (TYPE, form(MODEL), "'file'"),
        (TYPE, form(MODEL, FILE, MODEL), "'model' twice"),
        (TYPE, form(MODEL, FILE, end=b""), "not whole"),
        (TYPE, form(FILE, *[(f'name="{n}"', b"") for n in range(MAX_PARTS)]), "not whole, or has more"),
        (TYPE, form(("", b"x"), FILE), "without a name"),
        (TYPE, b"--xYz\r\n\r\nx\r\n--xYz--", "without headers"),
        (TYPE, b"--xYz\r\nX: y\r\n\r\nx\r\n--xYz--", "Content-Disposition"),
        (TYPE, form(('name="model"', b"\xff"), FILE), "'model' is no text"),
        (TYPE, form(('name="model"', b"x" * 100_000), FILE), "'model' has more than"),
        (TYPE, b"", "not whole"),
    ],
)
def test_a_form_that_is_none_is_refused_with_the_fault(content_type: str, body: bytes, fault: str) -> None:
    with pytest.raises(ApiError, match=fault) as refusal:
        read_form(TRANSCRIPTIONS, content_type, body)
    assert refusal.value.status == 400


@given(st.text(), st.binary())
def test_anything_is_read_or_refused(content_type: str, body: bytes) -> None:
    for kind in (content_type, TYPE):
        for each in (body, b"--xYz\r\n" + body + b"\r\n--xYz--", form(FILE, MODEL, ("", body))):
            try:
                read_form(TRANSCRIPTIONS, kind, each)
            except ApiError as error:
                assert error.status == 400
