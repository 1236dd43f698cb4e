"""Commands for trained models, by kind."""

TRANSLATE, GENERATE, EVALUATE = "translate", "generate", "evaluate"
_COMMANDS = {"translation": f"{TRANSLATE} {{job}} TEXT", "language": f"{GENERATE} {{job}} PROMPT"}
_KINDS = {"translation": "a translation model", "language": "a language model", "module": "a user's module"}


def refusal(kind: str, command: str, job: str) -> str | None:
    """Why `command` does not apply to a job of this kind, and which does; None if it applies."""
    right = _COMMANDS.get(kind, "")
    if right.startswith(f"{command} ") or (kind, command) == ("language", EVALUATE):
        return None
    subject = f"{job} is {_KINDS.get(kind, f'a model of the kind {kind!r}')}"
    if right:
        does = "evaluate tasks" if command == EVALUATE else command
        return f"{subject}, which does not {does}; use 'shardyard {right.format(job=job)}'"
    return f"{subject}, which no command uses; 'shardyard download {job}' downloads its checkpoint"
