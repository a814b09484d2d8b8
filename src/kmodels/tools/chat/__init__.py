"""`kmodels chat`: a chat with an instruction-tuned model in a terminal, or through a pipe."""

from typing import Annotated, TypeAlias

import typer

# Flags of every command that generates text.
Temperature: TypeAlias = Annotated[
    float | None,
    typer.Option(help="0 for the most likely token; by default as generation_config.json says"),
]
TopK: TypeAlias = Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")]
TopP: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Nucleus sampling: the smallest set of tokens with this total probability."),
]
MinP: TypeAlias = Annotated[
    float | None, typer.Option(help="Min-p sampling: least share of the largest probability.")
]
RepetitionPenalty: TypeAlias = Annotated[float | None, typer.Option(help="Above 1: repeat less.")]
Seed: TypeAlias = Annotated[int | None, typer.Option(help="Random seed of the draws.")]
Stop: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Text that ends a reply; repeat it for several.")
]


def chat(
    model: Annotated[
        str, typer.Argument(help="Directory of a run or a model, .gguf file or hf:// name.")
    ],
    system: Annotated[str | None, typer.Option(help="Text of a system message.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(help="Image of the first question, for models that take images; repeat it."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Largest number of tokens a reply.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    adapter: Annotated[str | None, typer.Option(help="Directory with a LoRA adapter.")] = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Directory, file or name of a smaller model, which drafts tokens."),
    ] = None,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens of each of its drafts.")] = 5,
    prompt_lookup_num_tokens: Annotated[
        int | None, typer.Option(help="Tokens of drafts that repeat earlier text.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="enable_thinking of the chat template."),
    ] = None,
) -> int:
    """Chat with a model; each line that comes through a pipe is a question."""
    from kmodels.runs.run_folder import model_in
    from kmodels.tools.chat import conversation, terminal

    opened = conversation.open_conversation(
        model_in(model),
        terminal.say,
        system=system,
        images=image or [],
        max_new_tokens=max_new_tokens,
        sampling={
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
        },
        stop=stop or None,
        adapter=adapter,
        assistant=assistant,
        num_assistant_tokens=num_assistant_tokens,
        prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        precision=precision,
        values={} if thinking is None else {"enable_thinking": thinking},
    )
    return terminal.run(opened)
