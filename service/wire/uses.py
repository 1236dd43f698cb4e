"""Uses of trained models: the command that each kind of job has, and words for whoever asks for another."""

TRANSLATE, GENERATE = "translate", "generate"
_COMMANDS = {"translation": f"{TRANSLATE} {{job}} TEXT", "language": f"{GENERATE} {{job}} PROMPT"}
_KINDS = {"translation": "a translation model", "language": "a language model", "module": "a user's module"}


def refusal(kind: str, command: str, job: str) -> str | None:
    """The sentence that says why `command` is not for a job of this kind, and what is; None where it is."""
    right = _COMMANDS.get(kind, "")
    if right.startswith(f"{command} "):
        return None
    told = f"{job} is {_KINDS.get(kind, f'a model of the kind {kind!r}')}"
    if right:
        return f"{told}, which does not {command}; use 'shardyard {right.format(job=job)}'"
    return f"{told}, which no command puts to use; 'shardyard download {job}' fetches its checkpoint"
