"""Markers inside chats, which vocabularies declare in more than one way."""

# The opening of a turn to its end. Older vocabulary files do not declare them as control tokens.
ENDS_OF_TURNS = {"<start_of_turn>": "<end_of_turn>", "<|turn>": "<turn|>"}
TURNS = (*ENDS_OF_TURNS.keys(), *ENDS_OF_TURNS.values())
# What a reply of Gemma 4 is made of besides its words: reasoning, calls of functions, and what
# these gave. They are control tokens, yet a text without them could not be read any more.
MARKS = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
