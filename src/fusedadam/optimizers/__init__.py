"""The optimizers: one file each, with its rule, its scalars and its class, on the base in contract/.

adamw.py, adamp.py, bert_adam.py, ema_adamw.py, sgd.py, rmsprop.py, adadelta.py, lamb.py, lion.py, radam.py, nadam.py,
adafactor.py, adan.py, ademamix.py, schedule_free.py
"""
