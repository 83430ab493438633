#!/bin/bash
# A GPT-3 of 175 billion parameters by Megatron-LM's own pretrain_gpt.py, on 1,024 A100: tensor parallel 8, pipeline of 16 stages with two
# chunks of layers each (interleaved), data parallel 8. Needs a checkout of Megatron-LM (core_v0.16.1), g++, make, and pip install six pybind11.
#
#   MEGATRON_PATH=~/Megatron-LM examples/megatron_gpt.sh                              emulated
#   MEGATRON_PATH=~/Megatron-LM NODES=8 PIPELINE=4 LAYERS=24 examples/megatron_gpt.sh   smaller
#   MAYA="" MEGATRON_PATH=~/Megatron-LM examples/megatron_gpt.sh                      for real, on each node
set -e
: "${MEGATRON_PATH:?the folder of a checkout of Megatron-LM}"
NODES=${NODES:-128} TENSOR=${TENSOR:-8} PIPELINE=${PIPELINE:-16} CHUNK=${CHUNK:-3} LAYERS=${LAYERS:-96} BATCH=${BATCH:-1536}
MAYA=${MAYA-maya run --gpu a100 --steps 1 --out maya-out/megatron --}
export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH="$MEGATRON_PATH:$PYTHONPATH"

exec $MAYA torchrun --nnodes "$NODES" --nproc-per-node 8 "$MEGATRON_PATH/pretrain_gpt.py" \
    --num-layers "$LAYERS" --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 \
    --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE" --num-layers-per-virtual-pipeline-stage "$CHUNK" \
    --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters 1000 --bf16 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --transformer-impl transformer_engine --attention-backend unfused --attention-softmax-in-fp32 \
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-decay-iters 900 --lr-warmup-fraction .001 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 51199 --eval-iters 0 --eval-interval 1000 --log-interval 1 --log-throughput "$@"
