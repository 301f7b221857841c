"""python -m kernels: what kernels/__init__.py records of the plain functions, ready to paste."""
import model_cable
import model_cope
import model_tra
from kernels import SOURCES, fingerprint
from rivals import classics, fox, stick

ORIGINALS = (model_cable.cable_attention, fox.fox_attention, classics.alibi_attention,
             model_tra.tra_attention, model_cope.cope_attention, stick.stick_attention)

if __name__ == "__main__":
    for plain in ORIGINALS:
        _, *helpers = SOURCES[plain.__name__]
        print(f"    {plain.__name__}={(fingerprint(plain, helpers), *helpers)},".replace("'", '"'))
