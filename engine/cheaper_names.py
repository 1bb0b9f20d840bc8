"""Names of cheaper arithmetic (engine/cheaper.py says what each is), by the precision that it is cheaper than. Without torch."""

COARSE = ("weights:int8", "weights:int8g", "weights:fp8", "weights:int4g", "head:int8", "kv:int8", "kv:fp8u")
NAMES = {
    "float32": (*COARSE, "weights:bfloat16", "weights:float16", "operands:tf32", "kv:bfloat16"),
    "bfloat16": COARSE,
    "float16": COARSE,
}
