"""Prompts of a language model as tokens. Loads no torch."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moe.data.conversations.template import ChatTemplate
from moe.data.tokenizer import Tokenizer
from moe.spec import ConversationsSpec, JobSpec, SpecError, spec_error

if TYPE_CHECKING:
    from moe.data.sequences import PreparedSequences


def encode_prompt(text: str, tokenizer: Tokenizer, template: ChatTemplate | None, max_tokens: int) -> list[int]:
    """Encode a prompt with the tokenizer's prefix, or with a chat template as a user message.

    Raises SpecError for more than `max_tokens` tokens.
    """
    if template is None:
        ids, num_written = tokenizer.prompt(text), len(tokenizer.prefix_ids)
    else:
        (encoding,) = tokenizer.encode_verbatim([template.render_prompt(text)])
        ids, num_written = encoding.ids, 0
    if len(ids) > max_tokens:
        rule = (
            f"must have at most {max_tokens - num_written:,} tokens, not {len(ids) - num_written:,}: the model was "
            "trained on texts of that length"
        )
        raise spec_error("too_large", "prompt", None, rule, "shorten it at its beginning")
    return ids


def evaluation_prompts(spec: JobSpec, data: "PreparedSequences") -> list[list[int]]:
    """Tokens of `train.evaluation.prompts`, which are user messages if the model is trained on conversations.

    Raises SpecError for prompts longer than the training texts.
    """
    template = None
    if isinstance(spec.data, ConversationsSpec):
        date = spec.data.date or datetime.now(UTC).date().isoformat()
        template = ChatTemplate.of_files({**data.tokenizer_files(), **data.carried_files()}, date)
    prompts, problems = [], []
    for index, text in enumerate(spec.train.evaluation.prompts):
        try:
            prompts.append(encode_prompt(text, data.tokenizer, template, spec.data.max_tokens))
        except SpecError as error:
            path = f"train.evaluation.prompts[{index}]"
            problems += [
                replace(problem, path=path, remedy="shorten or change the prompt") for problem in error.problems
            ]
    if problems:
        raise SpecError(problems)
    return prompts
