"""The numerical reference: is each change that reached the weights ``-lr * muon_update(full averaged gradient)``?"""

from ds_muon.verify.check import CannotVerify, UpdateCheck
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult

__all__ = ["CannotVerify", "Comparison", "UpdateCheck", "UpdateRecord", "VerifyResult"]
