"""Requests that come as a form (``multipart/form-data``): sounds to be written down, or translated.

The form is passed to the engine as it came; only its texts are read, for the model's name and the fields
that an engine's rules name. Whatever two readers could understand differently is refused: a name that comes
twice, a part without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dynaplan.gateway.openai_api import ApiError, ApiPath, Call, bad_request

FORM_TYPE = "multipart/form-data"

BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=?\- ]{0,69}[0-9A-Za-z'()+_,./:=?\-]")
"""What a boundary may be (RFC 2046, section 5.1.1)."""

MAX_PARTS = 64

MAX_TEXT_BYTES = 64 * 1024
"""The length of a text in a form; a file may be as long as the body."""

_MAY_REPEAT = "[]"
"""The end of a name that may come more than once, as in ``timestamp_granularities[]``."""


def read_form(endpoint: ApiPath, content_type: str, body: bytes) -> Call:
    """Read and check a form; raises ApiError (400) with the fault."""
    document: dict[str, Any] = {}
    boundary = _boundary(content_type)
    for name, file_name, data in _parts(b"--" + boundary.encode(), body):
        if name in document and not name.endswith(_MAY_REPEAT):
            raise bad_request(f"The form has {name!r} twice.", param=name, code="invalid_form")
        document[name] = file_name if file_name is not None else _text(name, data)
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("The form needs 'model', a non-empty text.", param="model")
    if missing := [name for name in endpoint.inputs if name not in document]:
        raise bad_request(f"The form needs {missing[0]!r}.", param=missing[0])
    return Call(
        endpoint=endpoint,
        body=body,
        document=document,
        model=model,
        is_stream=False,
        prompt="",
        prompt_tokens=0,
        has_media=True,
        content_type=f'{FORM_TYPE}; boundary="{boundary}"',
    )


def _boundary(content_type: str) -> str:
    header = _header(content_type)
    boundary = header.get_param("boundary")
    is_one = isinstance(boundary, str) and BOUNDARY.fullmatch(boundary)
    if header.get_content_type() != FORM_TYPE or not is_one:
        raise bad_request(
            f"Expected a form: Content-Type: {FORM_TYPE} with its boundary.", code="invalid_form"
        )
    return str(boundary)


def _parts(boundary: bytes, body: bytes) -> Iterator[tuple[str, str | None, bytes]]:
    """Yield name, file name (None for a text) and data of each part."""
    pieces = (b"\r\n" + body).split(b"\r\n" + boundary, MAX_PARTS + 2)
    if len(pieces) < 3 or len(pieces) > MAX_PARTS + 2 or not pieces[-1].startswith(b"--"):
        raise _broken(f"is not whole, or has more than {MAX_PARTS} parts")
    for piece in pieces[1:-1]:
        head, separator, data = piece.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"\r\n"):
            raise _broken("has a part without headers")
        header = _header(_disposition(head))
        name, file_name = (header.get_param(each) for each in ("name", "filename"))
        if not isinstance(name, str) or not name:
            raise _broken("has a part without a name")
        yield name, None if file_name is None else str(file_name), data


def _disposition(head: bytes) -> str:
    lines = head.decode("utf-8", "replace").split("\r\n")
    found = [line for line in lines if line.lower().startswith("content-disposition:")]
    if len(found) != 1:
        raise _broken("has a part without a Content-Disposition, or with two")
    return found[0].partition(":")[2].strip()


def _header(value: str) -> Any:
    """Return a parsed header with parameters, such as ``form-data; name="model"``."""
    from email.message import Message

    header = Message()
    header["Content-Type"] = value.replace("\r", " ").replace("\n", " ")
    return header


def _text(name: str, data: bytes) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise bad_request(f"{name!r} has more than {MAX_TEXT_BYTES} bytes.", param=name, code="invalid_form")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise bad_request(f"{name!r} is no text.", param=name, code="invalid_form") from None


def _broken(fault: str) -> ApiError:
    return bad_request(f"The form {fault}.", code="invalid_form")
