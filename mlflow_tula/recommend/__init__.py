"""The decision: candidates -> predictions -> what fits -> the objective's choice."""

from mlflow_tula.knee import KneeRule
from mlflow_tula.recommend.decide import recommend
from mlflow_tula.recommend.recommendation import CurvePoint, Objective, Recommendation

__all__ = ["CurvePoint", "KneeRule", "Objective", "Recommendation", "recommend"]
