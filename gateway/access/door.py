"""Who may ask for what: API keys, what each allows, and the tenants' limits. Both APIs ask here before all else.

Without a file of keys the door is open: everybody may do everything, for any tenant. Knows neither HTTP nor protobuf.
"""

import math
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.access.keys import ApiKey, KeyFile, digest_of_key
from gateway.limits import (
    DEFAULT_SERVICE_CLASS,
    SERVICE_CLASSES,
    check_affinity_key,
    check_cache_salt,
    check_priority,
    check_service_class,
)
from gateway.requests.call import Call, TenantTicket
from gateway.wishes import PREFILL, RESIDENCY
from services.cluster.rate_limit_scripts import CONCURRENCY, REQUESTS, TOKENS
from services.cluster.rate_limits import Limiter, Rate, Verdict
from services.cluster.tenant_usage import TenantLimits
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import InvalidRequest, PermissionDenied, RateLimited, Unauthenticated
from services.scheduling.regions import Residency, check_residency, named, narrows, permits

FIRST_EXPECTED_TOKENS = 256
"""The tokens that an answer without max_tokens is expected to have, until the tenant has had answers."""
EXPECTATION_SHARE = 0.1
"""The weight of the latest answer in that expectation."""

_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/=-]{1,512}) *", re.IGNORECASE)
_OPEN_KEY = ApiKey("", "", service_class=SERVICE_CLASSES[0], priority=2**31 - 1, is_admin=True)
"""What everybody may do where no keys are asked for."""
_STARTER_TENANT = "operator"
_DEFAULT_PLACE = SERVICE_CLASSES.index(DEFAULT_SERVICE_CLASS)


class FrontDoor:
    """The door of one gateway.

    `starter_digest` is the digest of one more admin key, for the program that started the gateway. `on_refusal` is told
    the name of the limit for each call that one refuses. `region` is the gateway's. Raises ConfigError where the file
    is broken.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        key_file: Path | None = None,
        starter_digest: str | None = None,
        on_refusal: Callable[[str], None] = lambda limit: None,
        region: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.region = region
        self._limiter = limiter
        self._on_refusal = on_refusal
        self._clock = clock
        self._file = None if key_file is None else KeyFile(key_file, on_change=self._take_tenants, clock=clock)
        self.tenant_weights: dict[str, float] = {}
        """Shares of tenants in a fair queue, as the file says now; one that is not in it has 1. Always the same object,
        so every holder sees each change."""
        self._tenants: frozenset[str] = frozenset()
        self._take_tenants()
        self._starter = None
        if starter_digest is not None:
            self._starter = ApiKey(starter_digest, _STARTER_TENANT, service_class=SERVICE_CLASSES[0], is_admin=True)
        self._expected_tokens: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether no keys are asked for."""
        return self._file is None

    @property
    def key_file(self) -> KeyFile | None:
        """The file of keys, if there is one."""
        return self._file

    def start(self) -> None:
        """Begins to follow the file, and to share limits and this gateway's presence, on the running loop."""
        if self._file is not None:
            self._file.start()
        self._limiter.start()

    async def close(self) -> None:
        """Stops watching the key file and writing to Redis."""
        if self._file is not None:
            await self._file.close()
        await self._limiter.close()

    def authenticate(self, authorization: Sequence[str]) -> ApiKey:
        """Returns the key that a caller has shown, from all its `authorization` headers.

        Raises Unauthenticated, and PermissionDenied where the data of its tenant must not be here.
        """
        if self._file is None:
            return _OPEN_KEY
        return self._held_here(self.key_with(_digest_shown(authorization)))

    def key_with(self, digest: str) -> ApiKey:
        """Returns the key with this digest, which a caller has shown. Raises Unauthenticated if it is not valid."""
        if self._file is None:
            return _OPEN_KEY
        key = self._file.keys.find_digest(digest)
        if key is None and self._starter is not None and secrets.compare_digest(self._starter.sha256, digest):
            key = self._starter
        if key is None:
            raise Unauthenticated("this API key is not known")
        if key.expires_s is not None and self._clock.unix_ns() >= key.expires_s * 1e9:
            raise Unauthenticated("this API key has expired")
        return key

    def check_admin(self, key: ApiKey) -> None:
        """Raises PermissionDenied for a key without the admin role."""
        if not key.is_admin:
            raise PermissionDenied("this needs an API key with the admin role", code="admin_required")

    def check_model(self, key: ApiKey, model: str, *, asked: str | None = None) -> None:
        """Raises PermissionDenied for a model that the key does not allow, whether there is such a model or not.

        Keys name models by their own names; `asked` is what the caller has said, such as an alias.
        """
        if not key.allows_model(model):
            raise PermissionDenied(
                f"this API key does not allow the model {(asked or model)[:64]!r}",
                field="model",
                code="model_not_allowed",
            )

    def check_prefill(self, key: ApiKey, call: Call) -> None:
        """Raises PermissionDenied if a call chooses where its prompt is computed, and its key does not allow that."""
        if call.wishes.prefill and not (key.choose_prefill or key.is_admin):
            raise PermissionDenied(f"{PREFILL} needs an API key with choose_prefill or the admin role", field=PREFILL)

    def tenant_of(self, key: ApiKey, asked: str) -> str:
        """Returns the tenant that a request counts for. Raises InvalidRequest if it names one that is not the key's."""
        if self._file is None:
            return asked
        if asked and asked != key.tenant and not key.is_admin:
            raise InvalidRequest(
                "tenant must be absent or the API key's own; only admin keys may name another one",
                field="tenant",
                code="invalid_value",
            )
        tenant = asked or key.tenant
        self.residency(tenant)
        return tenant

    def residency(self, tenant: str, asked: Residency = ()) -> Residency:
        """Returns the regions to which a request's data is held, by its tenant and by what its client asked for.

        Raises PermissionDenied for a client that would widen its tenant's rule, and at a gateway of another region.
        """
        rule = () if self._file is None else self._file.keys.residency_of(tenant)
        if asked and not narrows(asked, rule):
            raise PermissionDenied(
                f"{RESIDENCY} is {', '.join(asked)}, but the data of tenant {tenant} is held to {named(rule)}: a "
                "request may narrow that and not widen it",
                field=RESIDENCY,
                code="residency_too_wide",
            )
        check_residency(asked or rule, self.region, held=RESIDENCY if asked else f"residency of tenant {tenant}")
        return asked or rule

    def tenants_elsewhere(self) -> list[str]:
        """Returns the tenants whose data must not be here."""
        tenants = {} if self._file is None else self._file.keys.tenants
        return [name for name, tenant in tenants.items() if not permits(tenant.residency, self.region)]

    def _held_here(self, key: ApiKey) -> ApiKey:
        """Returns the key. Raises PermissionDenied where the data of its tenant must not be here."""
        self.residency(key.tenant)
        return key

    def let_in(self, call: Call, key: ApiKey, *, model: str) -> None:
        """Completes a call with what its key decides: tenant, models, service class, priority, a ticket for its limits,
        and the tenants with which it shares cached pages.

        `model` is the own name of the model that the call means. Raises InvalidRequest and, for what the key does not
        allow, PermissionDenied that names field and rule.
        """
        self.check_model(key, model, asked=call.model)
        call.allowed_models = key.models
        if call.allow_fallback is None:
            call.allow_fallback = key.allow_fallback
        call.tenant = self.tenant_of(key, call.tenant)
        call.residency = self.residency(call.tenant, call.wishes.residency)
        call.service_class = self._service_class(key, call.service_class)
        check_priority(call.priority)
        if not call.priority:
            call.priority = min(0, key.priority)
        if call.priority > key.priority:
            raise PermissionDenied(
                f"priority is {call.priority} but this API key allows at most {key.priority}", field="priority"
            )
        self.check_prefill(key, call)
        if call.affinity_key:
            check_affinity_key(call.affinity_key, field_name="user")
        if call.cache_salt:
            check_cache_salt(call.cache_salt)
        call.share_cache = "" if self._file is None else self._file.keys.share_cache_of(call.tenant)
        call.ticket = self.ticket(call.tenant)

    def knows_tenant(self, tenant: str) -> bool:
        """Returns whether the file of keys names the tenant."""
        return tenant in self._tenants

    def ticket(self, tenant: str) -> "Ticket | None":
        """Returns a ticket for one call of a tenant; None: it has no limits."""
        if self._file is None:
            return None
        limits = self._file.keys.limits_of(tenant)
        if limits.is_unlimited:
            return None
        return Ticket(self._limiter, tenant, limits, self._expected_tokens, on_refusal=self._on_refusal)

    def _take_tenants(self) -> None:
        self.tenant_weights.clear()
        if self._file is not None:
            self.tenant_weights.update(self._file.keys.weights)
            self._tenants = self._file.keys.tenant_names

    def _service_class(self, key: ApiKey, asked: str) -> str:
        """Returns the class asked for; without one the default, or the key's where that is less."""
        highest = SERVICE_CLASSES.index(key.service_class)
        if not asked:
            return SERVICE_CLASSES[max(highest, _DEFAULT_PLACE)]
        check_service_class(asked)
        if SERVICE_CLASSES.index(asked) < highest:
            raise PermissionDenied(
                f"service_class is {asked} but this API key allows at most {key.service_class}", field="service_class"
            )
        return asked


class KeyedDoor(FrontDoor):
    """The door of a caller that has shown the key with this digest before; headers say nothing here."""

    def __init__(self, door: FrontDoor, digest: str) -> None:
        vars(self).update(vars(door))
        self._digest = digest

    def authenticate(self, authorization: Sequence[str]) -> ApiKey:
        """Returns the key with that digest.

        Raises Unauthenticated if it is no longer valid, PermissionDenied where its tenant's data must not be here.
        """
        return self._held_here(self.key_with(self._digest))


class OperatorsDoor:
    """Who may read operators' pages at an address of their own: an admin, or the holder of the key with this digest.

    The digest opens no other door. Without it, and where no keys are asked for, everybody may.
    """

    def __init__(self, door: FrontDoor, *, digest: str | None = None) -> None:
        self._door = door
        self._digest = digest

    def check(self, authorization: Sequence[str]) -> None:
        """Raises Unauthenticated or PermissionDenied for a caller that is not an operator."""
        if self._digest is None and self._door.is_open:
            return
        shown = _digest_shown(authorization)
        if self._digest is not None and secrets.compare_digest(self._digest, shown):
            return
        if self._door.is_open:
            raise Unauthenticated("this API key is not known")
        self._door.check_admin(self._door.key_with(shown))


class Ticket(TenantTicket):
    """What one call has taken of its tenant's limits. May be used again after `leave`."""

    def __init__(
        self,
        limiter: Limiter,
        tenant: str,
        limits: TenantLimits,
        expected_tokens: dict[str, float],
        *,
        on_refusal: Callable[[str], None],
    ) -> None:
        self.hold = secrets.token_hex(12)
        self.headers: list[tuple[str, str]] = []
        self._limiter = limiter
        self._tenant = tenant
        self._limits = limits
        self._expected_tokens = expected_tokens
        self._on_refusal = on_refusal
        self._num_requests = 0
        self._num_tokens = 0
        self._num_unbounded = 0

    async def enter(self) -> None:
        """Takes a request and a place among those at once. Raises RateLimited."""
        verdict = await self._limiter.take(self._tenant, self._limits, num_requests=1, hold=self.hold)
        self._note(verdict, num_tokens=0)
        self._num_requests = verdict.num_requests

    async def charge(
        self, num_prompt_tokens: int, *, num_answers: int, max_tokens: int | None, room_tokens: int
    ) -> None:
        """Takes the tokens that the call may need: prompts, and `max_tokens` for each answer.

        Without `max_tokens`: what the tenant's answers have been like, at most `room_tokens`. Raises RateLimited.
        """
        if self._limits.tokens_per_minute is None:
            return
        if max_tokens is None:
            self._num_unbounded = num_answers
            expected = self._expected_tokens.get(self._tenant, FIRST_EXPECTED_TOKENS)
            max_tokens = min(room_tokens, math.ceil(expected))
        num_tokens = num_prompt_tokens + num_answers * max_tokens
        self._note(await self._limiter.take(self._tenant, self._limits, num_tokens=num_tokens), num_tokens=num_tokens)
        self._num_tokens = num_tokens

    async def charge_request(self) -> None:
        """Takes one request for a call that generates nothing. Raises RateLimited."""
        self._note(await self._limiter.take(self._tenant, self._limits, num_requests=1), num_tokens=0)

    def resume(self) -> None:
        """Counts a call that was let in before among those that run at once, and charges nothing."""
        self._limiter.hold(self._tenant, self._limits, self.hold)

    def leave(self, *, num_prompt_tokens: int, num_new_tokens: int, has_run: bool) -> None:
        """Replaces what an ended call had taken by what it used; if it has not run, all comes back."""
        if has_run and self._num_unbounded:
            mean = num_new_tokens / self._num_unbounded
            before = self._expected_tokens.get(self._tenant, FIRST_EXPECTED_TOKENS)
            self._expected_tokens[self._tenant] = before + EXPECTATION_SHARE * (mean - before)
        num_used = num_prompt_tokens + num_new_tokens if has_run else 0
        self._limiter.settle(
            self._tenant,
            self._limits,
            num_requests=0 if has_run else -self._num_requests,
            num_tokens=num_used - self._num_tokens,
            hold=self.hold,
        )
        self._num_requests = self._num_tokens = self._num_unbounded = 0

    def _note(self, verdict: Verdict, *, num_tokens: int) -> None:
        """Keeps the headers that the client is told. Raises RateLimited."""
        self.headers = [*_headers("requests", verdict.requests), *_headers("tokens", verdict.tokens)]
        if not verdict.limit:
            return
        limit = verdict.limit
        self._on_refusal(limit)
        most = getattr(self._limits, limit)
        if limit == CONCURRENCY:
            what = f"{most} requests at once"
        elif limit == TOKENS:
            what = f"{most} tokens per minute"
            if num_tokens > most > 0:
                what += f", and this request alone may need {num_tokens}"
                self.headers.append(("x-should-retry", "false"))
        else:
            assert limit == REQUESTS, limit
            what = f"{most} requests per minute"
        message = f"rate limit reached: {limit} of tenant {self._tenant} is {what}"
        raise RateLimited(message, retry_after_s=verdict.retry_after_s, limit=limit, headers=self.headers)


def _digest_shown(authorization: Sequence[str]) -> str:
    """Returns the digest of the key in all values of an `authorization` header. Raises Unauthenticated."""
    if not authorization:
        raise Unauthenticated("an API key is needed: send the header Authorization: Bearer KEY")
    match = _BEARER.fullmatch(authorization[0])
    if match is None or len(authorization) > 1:
        raise Unauthenticated("the header Authorization must be there once and be: Bearer KEY")
    return digest_of_key(match[1])


def shown_duration(seconds: float) -> str:
    """Returns a duration in OpenAI's spelling, rounded up to the millisecond: 0s, 120ms, 8.64s, 6m0s, 1h0m0s."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms <= 0:
        return "0s"
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    text = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return text
    return f"{minutes // 60}h{minutes % 60}m{text}" if minutes >= 60 else f"{minutes}m{text}"


def _headers(what: str, rate: Rate | None) -> list[tuple[str, str]]:
    if rate is None:
        return []
    return [
        (f"x-ratelimit-limit-{what}", str(rate.limit)),
        (f"x-ratelimit-remaining-{what}", str(rate.remaining)),
        (f"x-ratelimit-reset-{what}", shown_duration(rate.reset_s)),
    ]
