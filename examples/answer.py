"""One question, one answer, and what it cost."""

import fastea

model = fastea.load()  # the demo model; or fastea.load("folder-or-file.gguf", quant="int4", compile=True)
answer = model.generate("Name three rivers in Europe.", max_new_tokens=60)
print(answer.text)
print(f"{answer.new_tokens} tokens, {answer.tokens_per_s:.0f} a second, {answer.tokens_per_round:.2f} a round")
model.close()
