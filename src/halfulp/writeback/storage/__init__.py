"""Hold stored weights between steps, in one of three forms.

``container``
    The parameter itself (float32, float64) holds grid values, as in the paper.
``native``
    The parameter is bfloat16 or float16 itself. During a step the optimizer is given a float32 stand-in
    (:mod:`halfulp.writeback.storage.stand_in`); otherwise it would round before a policy sees the
    proposal. float8 codes are native, too: see :mod:`halfulp.writeback.storage.native_weight`.
``packed``
    The persistent state is codes, packed to the bit; the parameter is an empty shell of the right
    shape. A module's weights are decoded when its forward runs and dropped when it ends; weights that
    autograd saved are decoded again in the backward, one tensor at a time. Outside its own module's
    forward (a parent that reads ``self.child.weight``) each operation decodes the weight again, and an
    in-place write is converted to codes or refused: see :mod:`halfulp.writeback.storage.packed`.
    With shards, FSDP2 gathers the codes: see :mod:`halfulp.writeback.sharding.packed_shard`.
"""
