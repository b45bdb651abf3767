"""The numerical reference: is each change that reached the weights ``-lr * muon_update(full averaged gradient)``?"""

from ds_muon.verify.check import UpdateCheck, UpdateRecord

__all__ = ["UpdateCheck", "UpdateRecord"]
