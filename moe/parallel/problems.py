"""Problems of some ranks, raised on every rank."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from moe.parallel import json_collectives
from moe.spec import Problem, SpecError


def raise_on_all_ranks(problems: Iterable[Problem]) -> None:
    """Raise SpecError on every rank with the distinct problems of all ranks, in rank order. All ranks call it."""
    fields_by_rank = json_collectives.all_gather_json([problem.to_dict() for problem in problems])
    if distinct := distinct_problems(fields_by_rank):
        raise SpecError(distinct)


def distinct_problems(fields_by_rank: Iterable[list[dict[str, Any]]]) -> list[Problem]:
    """Distinct problems of all ranks, from their plain fields, in rank order."""
    distinct = {json.dumps(fields): Problem(**fields) for own_fields in fields_by_rank for fields in own_fields}
    return list(distinct.values())


def ask_rank0(ask: Callable[[], Any]) -> Any:
    """Return the result of `ask` on rank 0, a JSON value, on every rank. Its SpecError is raised on every rank."""

    def answer() -> Any:
        try:
            return {"result": ask()}
        except SpecError as error:
            if json_collectives.world_size() == 1:
                raise
            fields = [vars(problem) for problem in error.problems]
            return {"problems": json.loads(json.dumps(fields, default=repr))}

    message = json_collectives.broadcast_from_rank0(answer)
    if "problems" in message:
        raise SpecError([Problem(**fields) for fields in message["problems"]])
    return message["result"]
