"""The FastAPI application: all routes, with errors in OpenAI's format. `serve.py` builds and runs
it.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

from jmoe.serving.api_keys import ApiKeys
from jmoe.serving.chat import chat_router
from jmoe.serving.completions import completions_router
from jmoe.serving.errors import ApiError, ErrorResponse, add_error_handlers
from jmoe.serving.json_body import JsonRoute
from jmoe.serving.messages import messages_router
from jmoe.serving.metrics import ExpertView
from jmoe.serving.middleware import ID_HEADER, AuthMiddleware
from jmoe.serving.responses import responses_router
from jmoe.serving.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    Live,
    LiveDevices,
    ModelCard,
    ModelList,
    Status,
    TokenizeRequest,
    TokenizeResponse,
)
from jmoe.serving.service import Service
from jmoe.types import JsonObject

PAGE = Path(__file__).with_name("page.html")
# The policy of the page's meta element, plus frame-ancestors, which a meta element cannot set.
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src"
    " 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ERRORS: dict[int | str, JsonObject] = {
    400: {"description": "The request is not valid"},
    401: {"description": "An API key is needed"},
    403: {"description": "The host is not one that this server has"},
    404: {"description": "There is no such model or path"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is compressed"},
    429: {"description": "The queue is full; Retry-After says when to try again"},
    500: {"description": "The engine failed"},
    503: {"description": "The server is shutting down, or the engine has failed"},
    504: {"description": "The request took too long"},
}


def make_app(service: Service, api_keys: ApiKeys, version: str) -> FastAPI:
    """Return the application. Its lifespan starts and stops the engine loop of `service`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await service.loop.stop()
        service.close()

    responses = {
        status: {"model": ErrorResponse, **described} for status, described in ERRORS.items()
    }
    app = FastAPI(
        title="jmoe",
        version=version,
        lifespan=lifespan,
        responses=responses,
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)
    app.add_middleware(AuthMiddleware, api_keys=api_keys, config=service.config)
    # Added after, so runs before, the key check: a browser's preflight request carries no key.
    if service.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=(ID_HEADER, "retry-after"),
        )
    generating = completions_router, chat_router, responses_router, messages_router
    for router in (*generating, tokens_router, model_router, state_router):
        app.include_router(router(service))

    def openapi() -> JsonObject:
        """Return the OpenAPI schema without FastAPI's 422 responses: invalid requests get 400."""
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def tokens_router(service: Service) -> APIRouter:
    """Return the `/tokenize` and `/detokenize` routes."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
        """Return the token ids of a prompt or a chat."""
        service.check_model_name(body.model)
        client = request.state.client
        text, special = body.prompt or "", body.add_special_tokens
        if body.messages is not None:
            text = await service.render_chat(
                body.messages,
                body.add_generation_prompt,
                body.chat_template_kwargs,
                request,
                tools=body.tools,
            )
            special = False

        def make_response() -> TokenizeResponse:
            (tokens,) = service.encode_prompts([text], add_special_tokens=special)
            strs = (
                [service.vocabulary.token_text(token) for token in tokens]
                if body.return_token_strs
                else None
            )
            limit = service.max_seq_len
            return TokenizeResponse(
                count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=strs
            )

        return await service.run_text_work(make_response, len(text), client)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of token ids, special tokens included."""
        service.check_model_name(body.model)
        vocab_size, limit = service.loop.engine.config.vocab_size, service.max_seq_len
        if len(body.tokens) > limit:
            raise ApiError(
                400,
                f"tokens has {len(body.tokens)} entries; at most {limit} are allowed",
                param="tokens",
            )
        for token in body.tokens:
            if token >= vocab_size:
                raise ApiError(
                    400, f"a token of tokens = {token}: must be below {vocab_size}", param="tokens"
                )
        return DetokenizeResponse(
            prompt=service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )

    return router


def live_figures(service: Service, view: ExpertView) -> Live:
    """Return the figures that the status page shows, with the experts' places from `view`."""
    engine, scheduler = service.loop.snapshot.engine, service.loop.snapshot.scheduler
    return Live(
        model=service.name,
        chat=service.has_chat,
        policy=engine.policy,
        uptime_s=time.time() - service.created,
        requests_running=scheduler.running,
        requests_waiting=scheduler.waiting,
        kv_tokens_used=scheduler.kv_tokens,
        kv_tokens_total=service.loop.kv_tokens_total,
        prompt_tokens_total=service.metrics.prompt_tokens_total,
        generation_tokens_total=service.metrics.generation_tokens_total,
        computed_tokens_total=engine.tokens,
        tokens_per_s=service.loop.tokens_per_s,
        slots=[None if slot is None else list(slot) for slot in view.slots],
        streamed_bytes_total=engine.streamed_bytes,
        nvme_bytes_total=engine.nvme_bytes,
        hit_rate=engine.hit_rate,
        expert_hits_total=engine.expert_hits,
        experts_chosen_total=engine.experts_chosen,
        waited_s=engine.waited_s,
        roofline_fraction=engine.roofline_fraction,
        expert_counts=view.expert_counts,
        devices=(
            None if engine.placement is None else LiveDevices.model_validate(vars(engine.placement))
        ),
    )


def model_router(service: Service) -> APIRouter:
    """Return the routes that list and describe the served model."""
    router = APIRouter()
    card = ModelCard(
        id=service.name,
        created=service.created,
        max_model_len=service.max_seq_len,
        sampling_defaults=dict(service.model_sampling.defaults),
    )

    def adapter_card(name: str) -> ModelCard:
        return card.model_copy(update={"id": name, "parent": service.name})

    @router.get("/v1/models")
    async def models() -> ModelList:
        """List the served model and its adapters."""
        return ModelList(data=[card, *map(adapter_card, service.adapters)])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> ModelCard:
        """Describe the served model, or one of its adapters."""
        service.check_model_name(model)
        return adapter_card(model) if model in service.adapters else card

    return router


def state_router(service: Service) -> APIRouter:
    """Return the routes for health, metrics and the status page."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Status:
        """Return 200 while the engine works; 503 asks the supervisor for a restart."""
        if service.loop.failure is not None:
            service.loop.check_ready()
        return Status()

    @router.get("/ready")
    async def ready() -> Status:
        """Return 200 while requests are accepted, else 503."""
        service.loop.check_ready()
        return Status()

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {METRICS_TYPE: {}}}}
    )
    async def metrics() -> Response:
        """Return the metrics in Prometheus's text format."""
        await service.loop.expert_view()  # refreshes the expert load
        return Response(service.metrics.render_text(), headers={"content-type": METRICS_TYPE})

    @router.get("/live")
    async def live() -> Live:
        """Return the live figures that the status page shows."""
        return live_figures(service, await service.loop.expert_view())

    @router.get("/", response_class=FileResponse, include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(
            PAGE, media_type="text/html", headers={"content-security-policy": PAGE_POLICY}
        )

    return router
