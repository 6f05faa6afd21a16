"""Several questions decoded together: each answer is the one it would get alone."""

import fastea

model = fastea.load(max_seq_len=512)
questions = ["What is the capital of Italy?", "What do bees make?", "How many legs has a spider?"]
for question, answer in zip(questions, model.generate(questions, max_new_tokens=40), strict=True):
    print(f"{question}\n  {answer.text.strip()}")
model.close()
