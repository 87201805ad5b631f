# The extender, and `python -m extender.server.certificates`. From the root of the repository:
#
#   docker build -f images/extender.Dockerfile -t idlegpu-extender:0.1.0 .
#
# `docker buildx build --platform linux/amd64,linux/arm64` builds it for both.
#
# The Python that the tests run with, for both platforms, pinned by digest.
ARG PYTHON=docker.io/library/python:3.11.15-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba

FROM ${PYTHON} AS build
# A mirror of PyPI, if the build has no internet access.
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml ./
COPY images/build.sh images/extender.txt images/
COPY agent agent
COPY extender extender
RUN images/build.sh extender /opt/idlegpu

FROM ${PYTHON}
COPY --from=build /opt/idlegpu /opt/idlegpu
# Import modules only from there and from Python itself, never from the working directory.
ENV PYTHONPATH=/opt/idlegpu PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A numeric user, so that Kubernetes sees that it is not root (runAsNonRoot).
USER 65532:65532
WORKDIR /
EXPOSE 8888 8889 8890 9401
ENTRYPOINT ["python", "-m", "extender"]
