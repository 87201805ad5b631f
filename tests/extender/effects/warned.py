"""Pod with an annotation problem."""

from extender.core.request.annotations import AnnotationProblem
from extender.core.request.request import PodRef

POD = PodRef(uid="u1", namespace="ns", name="train")
PROBLEM = AnnotationProblem(
    annotation="idlegpu.io/strategy",
    value="sprad",
    allowed="auto, spread or pack",
    default_used="auto",
)
