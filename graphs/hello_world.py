"""Three plain Python services; try ``curl localhost:8000/generate -d '{"text": "test"}'``."""

from collections.abc import AsyncIterator
from typing import Any

from dynaplan.sdk import ServiceConfig, api, depends, endpoint, service


@service(dynamo={"namespace": "inference"})
class Backend:
    """The last of the three."""

    def __init__(self) -> None:
        options = ServiceConfig.get_instance().get_parsed_config("Backend")
        self.message = options.get("message", "back")

    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Add our word to the text, and answer word by word."""
        text = f"{request['text']}-{self.message}"
        for word in text.split():
            yield f"Backend: {word}"


@service(dynamo={"namespace": "inference"})
class Middle:
    """Passes the request on with a word of its own."""

    backend = depends(Backend)

    def __init__(self) -> None:
        options = ServiceConfig.get_instance().get_parsed_config("Middle")
        self.message = options.get("message", "mid")

    @endpoint()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """Add our word to the text, and hand on what the Backend answers."""
        async for response in self.backend.generate({"text": f"{request['text']}-{self.message}"}):
            yield f"Middle: {response}"


@service(dynamo={"namespace": "inference"})
class Frontend:
    """The service that users call."""

    middle = depends(Middle)

    @api()
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """``POST /generate``."""
        async for response in self.middle.generate(request):
            yield f"Frontend: {response}"


Frontend.link(Middle).link(Backend)
