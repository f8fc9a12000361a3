"""What tests inside transformers' generate share: prompts, padding, a streamer that listens."""

from transformers.generation.streamers import BaseStreamer

PROMPTS = ["the cat is in the ", "on", "a cat and "]


def encoded(tokenizer, texts):
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


class Collect(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended += 1
