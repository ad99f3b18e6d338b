"""A graph written against the original's SDK; it runs under the original and under dynaplan."""

from dynamo.sdk import async_on_start, depends, dynamo_context, endpoint, service
from pydantic import BaseModel


class Question(BaseModel):
    text: str
    times: int = 1


@service(dynamo={"namespace": "interop"}, resources={"cpu": "1"}, traffic={"timeout": 30})
class Backend:
    def __init__(self) -> None:
        self.suffix = ""

    @async_on_start
    async def start(self) -> None:
        self.suffix = f"-{dynamo_context['service_name']}"

    @endpoint()
    async def generate(self, request: Question):
        for number in range(request.times):
            yield {"text": f"{request.text}{self.suffix}", "number": number}

    @endpoint(name="shout")
    async def loud(self, request: Question):
        yield request.text.upper()

    @endpoint()
    async def broken(self, request: Question):
        yield "first"
        raise ValueError("broken on purpose")


@service(dynamo={"namespace": "interop"}, resources={"cpu": "1"})
class Middle:
    backend = depends(Backend)

    @endpoint()
    async def generate(self, request: Question):
        asked = Question(text=f"{request.text}-mid", times=request.times)
        async for item in self.backend.generate(asked.model_dump_json()):
            yield {"middle": item, "kind": type(item).__name__}
        async for item in self.backend.shout(asked.model_dump_json()):
            yield f"{item}!"


@service(dynamo={"namespace": "interop"}, resources={"cpu": "1"})
class Front:
    middle = depends(Middle)

    @endpoint()
    async def generate(self, request: Question):
        async for item in self.middle.generate(request.model_dump_json()):
            yield item


Front.link(Middle).link(Backend)
