"""fastea: LLaMA-family models on one device with EAGLE speculative decoding. The text is the model's own, sooner.

import fastea
model = fastea.load()                        # the demo model and its head
print(model.generate("Explain why the sky is blue.").text)
"""

from fastea.answer import Output
from fastea.chat import Chat
from fastea.config import FasteaError
from fastea.generator import Generator
from fastea.loading import load
from fastea.sampling import Sampling

__all__ = ["Chat", "FasteaError", "Generator", "Output", "Sampling", "load"]
__version__ = "0.1.0"
