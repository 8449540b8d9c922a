"""Advice to an operator about a Redis that does not answer or refuses commands, from the text of its error."""

import re

GUIDE = "docs/several-machines.md"
_COMMAND = re.compile(r"(?:user (\S+)|this user) has no permissions to run the '([^']+)' command", re.IGNORECASE)
_SOME_COMMAND = re.compile(r"can't run this command or subcommand")
_KEY = re.compile(r"access (?:a|one of the|at least one of the) (key|channel)")
_PASSWORD_WORDS = ("password", "noauth", "wrongpass", "authenticat")


def is_permission_denied(error: str) -> bool:
    """Returns whether an error says that the ACL of Redis' user lacks a rule."""
    return any(pattern.search(error) is not None for pattern in (_COMMAND, _SOME_COMMAND, _KEY))


def redis_remedy(error: str) -> str:
    """Returns how to repair the connection to a Redis whose last call failed with this text."""
    if (found := _COMMAND.search(error)) is not None:
        user, command = found[1] or "the user in --redis", found[2]
        return f"add +{command} to the ACL rules of {user}, or use the rules in {GUIDE}"
    if _SOME_COMMAND.search(error):
        return f"use the ACL rules in {GUIDE}; ACL LOG on the Redis server names the user and the denied command"
    if (found := _KEY.search(error)) is not None:
        rule = "~tandem:*" if found[1] == "key" else "&tandem:*"
        return f"add {rule} to the ACL rules of the user in --redis, or use the rules in {GUIDE}"
    lowered = error.lower()
    if any(word in lowered for word in _PASSWORD_WORDS):
        return "set the user and the password of this Redis in --redis (TANDEM_REDIS)"
    if "refused" in lowered:
        return "start Redis, or set its right address in --redis (TANDEM_REDIS)"
    return "check Redis, its machine, and the network to it; running requests continue without Redis"
