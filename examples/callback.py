"""A stream that the program ends: after two sentences, whatever the model would still say."""

import fastea

model = fastea.load()


def enough(outputs: list[fastea.Output]) -> bool:
    """Asked after every round, with what has been written so far."""
    return outputs[0].text.count(".") >= 2


stream = model.stream("Tell me about the moon.", temperature=0.8, seed=7, stop_when=enough)
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n[{stream.outputs[0].finish_reason} after {stream.outputs[0].new_tokens} tokens]")
model.close()
