"""The door for FastAPI: a dependency that documents itself.

    idempotency = Idempotency(store="redis://...", scope=current_tenant)
    router = APIRouter(route_class=IdempotentRoute)

    @router.post("/orders", status_code=201)
    async def create_order(order: Order, attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        ...

The key is claimed by the dependency, after every other dependency of the route: who may not call
it is turned away by your own code, and is never shown what was answered before. `IdempotentRoute`
does what a dependency cannot: it reads the body before FastAPI does, gathers the response, and
answers a repeated request with the recorded one.

What is easy to get wrong: a dependency that ends early. FastAPI ends dependencies with `yield`
after the response was sent, unless they have scope="function"; a session of that kind would be
closed before its rows and the record are committed, so it is refused.
"""

from __future__ import annotations

import contextvars
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

try:
    from fastapi import Depends, Security, routing
    from fastapi.dependencies.models import Dependant
    from fastapi.dependencies.utils import get_flat_params, get_parameterless_sub_dependant
    from fastapi.exceptions import RequestValidationError
    from fastapi.utils import create_model_field, deep_dict_update
    from pydantic import BaseModel, ConfigDict
    from starlette.exceptions import HTTPException
    from starlette.requests import HTTPConnection
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response as StarletteResponse
except ImportError as error:  # pragma: no cover - every test environment has it
    from semel.errors import SettingsError

    raise SettingsError(f"{error.name} is not installed: pip install 'semel[fastapi]'") from error

from semel.attempt import CURRENT, Attempt, leave
from semel.colour import ASYNC
from semel.errors import SettingsError, StoreUnavailableError
from semel.http import openapi, protocol
from semel.http.asgi import (
    Again,
    ASGIApp,
    ASGIScope,
    Conversation,
    Message,
    Receive,
    Send,
    compared,
    gathered,
    request_of,
)
from semel.http.door import Door
from semel.http.exchange import Exchange, RequestAttempt
from semel.http.protocol import KEY_HEADER, Refusal, Response
from semel.http.request import ATTEMPT, checked_tenant, key_of
from semel.http.rule import Rule, Ruling, as_rule, changed
from semel.http.starlette import add_exception_handlers, exception_handlers
from semel.http.unkeyed import Unkeyed
from semel.imports import importing
from semel.ports import Store
from semel.settings import as_store

__all__ = [
    "Idempotency",
    "IdempotentRoute",
    "RequestAttempt",
    "Rule",
    "add_exception_handlers",
    "exception_handlers",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

# Where the request's scope has the visit.
VISIT = "semel.visit"

Dependency: TypeAlias = Callable[..., Any]
Handler: TypeAlias = Callable[[StarletteRequest], Awaitable[Any]]


# --- the dependency -----------------------------------------------------------------------------


class Idempotency:
    """A dependency: what a route's `Idempotency-Key` means, and the attempt at answering it.

    `scope` says whose key it is: a dependency of yours that gives the tenant or the signed-in
    user, and may refuse by raising; or the name of the only tenant there is. `session` is the
    dependency that gives the SQLAlchemy session of the request: then the session is committed
    together with the recorded response when that is no error, and rolled back otherwise.

    Without a key, where it is optional, the handler gets an attempt with `keyed` False, and the
    session is treated the same.
    """

    def __init__(
        self,
        *,
        scope: str | Dependency,
        store: Store | str | None = None,
        rule: Rule | None = None,
        session: Dependency | None = None,
    ) -> None:
        self.rule = as_rule(rule)
        if self.rule.scope is not None:
            raise SettingsError("Rule(scope=) is for the middleware; write Idempotency(scope=)")
        self.scope = scope
        self.session = session
        self.ruling = Ruling(self.rule, scope)
        self._given = None if store is None else as_store(store)
        self._door = Door(self._given, ASYNC)
        if self._given is not None:
            _check_store(self._given, session)
        self.__signature__ = _signature(scope, session)

    def but(self, **changes: Any) -> Idempotency:
        """The same with another rule: `idempotency.but(key="required", on_error="hold")`."""
        rule = changed(self.rule, changes)
        return Idempotency(scope=self.scope, store=self._given, rule=rule, session=self.session)

    async def __call__(
        self, connection: HTTPConnection, tenant: Any = None, session: Any = None
    ) -> RequestAttempt | None:
        if connection.scope["type"] != "http":
            return None
        visit: Visit | None = connection.scope.get(VISIT)
        if visit is None:
            raise SettingsError(
                "Depends(Idempotency) needs the route class IdempotentRoute: write "
                "APIRouter(route_class=IdempotentRoute), or app.router.route_class = "
                "IdempotentRoute before the routes are made"
            )
        whose = checked_tenant(self.scope if isinstance(self.scope, str) else tenant)
        return await visit.enter(self, whose, session)

    def exchange(self, visit: Visit, tenant: str) -> Exchange:
        """The exchange for a request that has brought a key."""
        text = key_of(visit.found)
        return self._door.exchange(self.ruling, visit.request, text, tenant, visit.fingerprint)

    def store(self) -> Store:
        return self._door.store


def _check_store(store: Store, session: Dependency | None) -> None:
    if session is not None and not hasattr(store, "bind"):
        raise SettingsError(
            f"{type(store).__name__} cannot share a transaction; with session=, give "
            "SQLStore(url), or SQLStore over an AsyncEngine, on the session's own database"
        )


def _signature(scope: str | Dependency, session: Dependency | None) -> inspect.Signature:
    """What FastAPI sees, and solves before it asks us."""
    wanted = [_parameter("connection", HTTPConnection)]
    if not isinstance(scope, str):
        wanted.append(_parameter("tenant", Any, Depends(scope)))
    if session is not None:
        wanted.append(_parameter("session", Any, Depends(session)))
    return inspect.Signature(wanted)


def _parameter(name: str, kind: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


# --- one request --------------------------------------------------------------------------------


class Answered(HTTPException):
    """The request has its answer, and the handler is not called.

    On its way from the dependency to the route; an HTTPException, since those are no errors to
    whoever traces dependencies.
    """

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Visit:
    """One request at a route: where route, dependency and response meet.

    Until the key is claimed, everything passes as it is.
    """

    def __init__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request = request_of(scope)
        self.found: list[bytes] = []
        self.fingerprint = b""
        self.cleared = False
        """Were all dependencies solved that need no attempt? Else nothing is claimed or shown."""
        self.begun = False
        """Were all dependencies solved? Then the handler is called next."""
        self._receive = receive
        self._send = send
        self._again: Again | None = None
        self._exchange: Exchange | None = None
        self._conversation: Conversation | None = None
        self._unkeyed: Unkeyed | None = None
        self._attempt: RequestAttempt | None = None
        self._token: contextvars.Token[Attempt | None] | None = None

    async def hold(self, app: ASGIApp) -> None:
        self.scope[VISIT] = self
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            await self._over(error)
            raise
        else:
            await self._over(None)
        finally:
            self._tidy()

    # What the route sees.

    async def receive(self) -> Message:
        return await (self._again or self._receive)()

    async def send(self, message: Message) -> None:
        if self._conversation is not None:
            await self._conversation.send(message)
            return
        if self._unkeyed is not None and message["type"] == "http.response.start":
            await self._unkeyed.answered(message["status"])
        await self._send(message)

    async def read(self, ruling: Ruling) -> bool:
        """Take the body, if there is a key; False when the client went away meanwhile."""
        if self.request.method not in ruling.methods:
            return True
        self.found = [content for name, content in self.request.headers.raw if name == KEY_HEADER]
        if not self.found:
            return True
        body = await gathered(self.request, self._receive, ruling.max_body)
        if body is None:
            return False
        try:
            self.fingerprint = await compared(ruling, self.request, body)
        except BaseException:
            body.close()
            raise
        self._again = Again(body, self._receive)
        return True

    # What the dependency asks for.

    async def enter(self, door: Idempotency, tenant: str, session: Any) -> RequestAttempt:
        """The attempt at this request; `Answered` when there is nothing left to attempt."""
        if self._attempt is None:
            self._attempt = await self._made(door, tenant)
            # Not cleared, the session was not solved either, and FastAPI is about to say why.
            if door.session is not None and self.cleared:
                self._attempt.bind(session)
        return self._attempt

    async def _made(self, door: Idempotency, tenant: str) -> RequestAttempt:
        if ATTEMPT in self.scope:  # of a middleware in front of the app, which records it
            outer: RequestAttempt = self.scope[ATTEMPT]
            return outer
        if not self.cleared:  # FastAPI is about to say what was not valid
            return self._without_key(door, tenant)
        try:
            return await self._claimed(door, tenant)
        except Refusal as refused:
            raise Answered(refused.response) from None
        except StoreUnavailableError as error:
            raise Answered(protocol.refusal(error)) from error

    async def _claimed(self, door: Idempotency, tenant: str) -> RequestAttempt:
        if self.found:
            return await self._keyed(door, tenant)
        if door.ruling.required and self.request.method in door.ruling.methods:
            key_of(self.found)
        return self._without_key(door, tenant)

    async def _keyed(self, door: Idempotency, tenant: str) -> RequestAttempt:
        assert self._again is not None
        self._exchange = exchange = door.exchange(self, tenant)
        answer = await exchange.open()
        if answer is not None:
            raise Answered(answer)
        self._conversation = Conversation(exchange, door.ruling, self._again, self._send)
        self._token = self._conversation.begin(self.scope)
        assert isinstance(exchange.attempt, RequestAttempt)
        return exchange.attempt

    def _without_key(self, door: Idempotency, tenant: str) -> RequestAttempt:
        self._unkeyed = Unkeyed(door.ruling, door.store(), self.request, tenant)
        attempt = self._unkeyed.attempt
        assert isinstance(attempt, RequestAttempt)
        self._token = CURRENT.set(attempt)
        self.scope[ATTEMPT] = attempt
        return attempt

    # How it ends.

    async def call_off(self, error: BaseException) -> None:
        """The handler was not called: the claim is given back, whatever the rule says of errors."""
        if self._conversation is None or self._exchange is None or self._exchange.closed:
            return
        self._conversation = None
        self._exchange.closed = True
        said = error if isinstance(error, Exception) else RuntimeError("cut off before it began")
        await ASYNC.shield(self._exchange.fail(said))
        if self._again is not None:
            self._again.let_through()

    async def _over(self, error: BaseException | None) -> None:
        if error is not None and not self.begun:
            await self.call_off(error)
        if self._conversation is not None:
            await self._conversation.over(error)
        elif self._unkeyed is not None:
            await self._unkeyed.answered(protocol.PROBLEMS["interrupted"][0])

    def _tidy(self) -> None:
        if self._token is not None:
            leave(self._token)
        if self._conversation is not None:
            self._conversation.tidy()
        elif self._exchange is not None:
            self._exchange.let_go()
        if self._again is not None:
            self._again.close()


class Reply(StarletteResponse):
    """An answer as FastAPI knows them: a route class above ours may look at it."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.body, answer.status)
        self.raw_headers = list(answer.headers)


NOBODY = Response(400, (), b"")
"""To a client that went away before it had sent its body."""


# --- the route ----------------------------------------------------------------------------------


class IdempotencyProblem(BaseModel):
    """An error as RFC 9457 has it."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str


class IdempotentRoute(routing.APIRoute):
    """A route whose dependencies may have an `Idempotency` among them; without, it is as any."""

    _guarded = False

    def get_route_handler(self) -> Any:
        placed = _as_included(self)
        door = _door_of(placed.dependant)
        if door is None:
            return super().get_route_handler()
        self._guarded = True
        _arrange(placed, door)
        if door.ruling.methods & set(placed.methods):
            _describe(placed, door.ruling)
        return _attended(super().get_route_handler(), door.ruling)

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if self._guarded:
            await Visit(scope, receive, send).hold(super().handle)
        else:
            await super().handle(scope, receive, send)


def _attended(handler: Handler, ruling: Ruling) -> Handler:
    async def attended(request: StarletteRequest) -> Any:
        visit: Visit = request.scope[VISIT]
        try:
            if not await visit.read(ruling):
                return Reply(NOBODY)
            return await handler(request)
        except Exception as error:
            invalid = isinstance(error, RequestValidationError) and _is_fastapis(error)
            if invalid or not visit.begun:
                await visit.call_off(error)
            if invalid and not visit.cleared:
                _say_once(error)
            if isinstance(error, Answered):
                return Reply(error.answer)
            if isinstance(error, Refusal):
                return Reply(error.response)
            raise

    return attended


def _is_fastapis(error: Exception) -> bool:
    """Did FastAPI itself raise it? A handler may raise the same error, and has run then."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") == routing.__name__


def _as_included(route: routing.APIRoute) -> Any:
    """The route with what the routers around it add.

    FastAPI makes a handler for every place that a route is included in; before it did, each place
    had a route of its own.
    """
    placing: Any = getattr(routing, "_effective_route_context_var", None)
    place = None if placing is None else placing.get()
    return place if place is not None and place.original_route is route else route


def _dependencies(dependant: Dependant) -> Iterator[Dependant]:
    for below in dependant.dependencies:
        yield below
        yield from _dependencies(below)


def _door_of(dependant: Dependant) -> Idempotency | None:
    calls = [below.call for below in _dependencies(dependant)]
    doors = list(dict.fromkeys(call for call in calls if isinstance(call, Idempotency)))
    if len(doors) > 1:
        raise SettingsError(
            f"{dependant.path} depends on {len(doors)} Idempotency objects; a request has one key, "
            "so keep one of them"
        )
    return doors[0] if doors else None


def _arrange(placed: Any, door: Idempotency) -> None:
    """Solve ours last: whoever may refuse the request has done so before anything is claimed."""
    dependant: Dependant = placed.dependant
    _check_session(dependant, door)
    clearing = _added(placed, Clearing(list(_others(dependant, door))))
    for below in _dependencies(clearing):
        below.use_cache = True  # what is solved is not asked again
    below_ours = [below for below in dependant.dependencies if _leads_to(below, door)]
    others = [below for below in dependant.dependencies if not _leads_to(below, door)]
    dependant.dependencies[:] = [*others, clearing, *below_ours, _added(placed, _begin)]


def _added(placed: Any, dependency: Dependency) -> Dependant:
    return get_parameterless_sub_dependant(depends=Depends(dependency), path=placed.path_format)


def _others(dependant: Dependant, door: Idempotency) -> Iterator[Dependant]:
    """What can be solved without the attempt, also where it is asked for beside it."""
    for below in dependant.dependencies:
        if not _leads_to(below, door):
            yield below
        elif below.call is not door:
            yield from _others(below, door)


class Clearing:
    """A dependency on all the others: it is called when none of them has refused.

    To FastAPI, one whose parameters are not valid (a token that is missing, say) is no reason not
    to solve the next; ours would show the recorded response to somebody who was not let in. But
    nothing is called that depends on one.
    """

    def __init__(self, others: list[Dependant]) -> None:
        asked = [_parameter(f"other_{n}", Any, _same(other)) for n, other in enumerate(others)]
        self.__signature__ = inspect.Signature([_parameter("connection", HTTPConnection), *asked])

    async def __call__(self, connection: HTTPConnection, **_others: Any) -> None:
        visit: Visit = connection.scope[VISIT]
        visit.cleared = True


def _same(other: Dependant) -> Any:
    """What FastAPI takes for the same dependency, so that it is called once."""
    # FastAPI before 0.121 knows no scopes, and has those of security in one list.
    known: Any = other
    scopes: list[str] = []
    for name in ("parent_oauth_scopes", "own_oauth_scopes", "security_scopes"):
        scopes += getattr(known, name, None) or ()
    if scopes:
        return Security(other.call, scopes=scopes)
    lasts = getattr(known, "scope", None)
    return Depends(other.call, **({} if lasts is None else {"scope": lasts}))


def _say_once(error: Any) -> None:
    """What is not valid was found where it is asked for, and again where all are cleared."""
    found: list[Any] = error.errors()
    said: dict[tuple[str, str], Any] = {}
    for each in found:
        said.setdefault((each["type"], str(each["loc"])), each)
    found[:] = said.values()


def _leads_to(dependant: Dependant, door: Idempotency) -> bool:
    return dependant.call is door or any(below.call is door for below in _dependencies(dependant))


async def _begin(connection: HTTPConnection) -> None:
    visit: Visit = connection.scope[VISIT]
    visit.begun = True


def _check_session(dependant: Dependant, door: Idempotency) -> None:
    """The handler must be given the very session that is committed, and it must last."""
    if door.session is None:
        return
    for below in _dependencies(dependant):
        if below.call != door.session:
            continue
        # FastAPI before 0.121 knows no scopes.
        if getattr(below, "scope", None) == "function" or not below.use_cache:
            name = getattr(door.session, "__name__", "the session")
            raise SettingsError(
                f"{dependant.path} takes {name} with scope='function' or use_cache=False: that is "
                "another session than the one that is committed with the response. Write "
                f"Depends({name})"
            )


# --- OpenAPI ------------------------------------------------------------------------------------


# FastAPI's own answer to a body that is not even text. It goes without saying, until something
# else is said of 400.
UNREADABLE: dict[str, Any] = {
    "responses": {
        "400": {
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": {"detail": {"type": "string"}}}
                }
            }
        }
    }
}


def _describe(placed: Any, ruling: Ruling) -> None:
    given = placed.openapi_extra or {}
    if "x-idempotency-retention" not in given:  # else by the route itself, before it was included
        told = {str(status) for status in placed.responses}
        usual = _usual(placed, told)
        placed.openapi_extra = openapi.operation(ruling, _success(placed), told, usual)
        if placed.body_field is not None:
            deep_dict_update(placed.openapi_extra, UNREADABLE)
        deep_dict_update(placed.openapi_extra, given)
    # Under a name that is no status: the schema becomes a component, and no response changes.
    placed.response_fields = {
        **placed.response_fields,
        "problem": create_model_field(
            name=openapi.SCHEMA, type_=IdempotencyProblem, mode="serialization"
        ),
    }


def _usual(placed: Any, told: set[str]) -> dict[str, str]:
    """What FastAPI says of a status by itself, and would be written over."""
    validated = placed.body_field is not None or get_flat_params(placed.dependant)
    own = told & {"422", "4XX", "default"}
    return {"422": "Validation Error"} if validated and not own else {}


def _success(placed: Any) -> str:
    if placed.status_code is not None:
        return str(placed.status_code)
    kind = getattr(placed.response_class, "value", placed.response_class)
    given = inspect.signature(kind.__init__).parameters.get("status_code")
    usual = None if given is None else given.default
    return str(usual) if isinstance(usual, int) else "200"
