#!/usr/bin/env bash
# Downloads the public files that tests marked `#[test(fixtures)]` read: tokenizers, configs and test vectors, but no
# weights. Needs curl and sha256sum. The download is about 60 MB. .ci/run does not run this script.
#
#   scripts/fixtures.sh FOLDER   downloads the files that FOLDER lacks
#   scripts/fixtures.sh --list   prints the files and their URLs, and downloads nothing
#
# For the files of Llama and Mistral, accept the licenses on huggingface.co and set HF_TOKEN.
# docs/contributing.md, section "Fixtures", lists the files that are not public, and says how to skip their tests.
#
# Exits with 1 if a file cannot be downloaded or is not the version with which the tests were written, and with 2 if the
# arguments are wrong.
set -euo pipefail

fail() {
  echo "fixtures.sh: $*" >&2
  exit 1
}

usage() {
  echo "usage: scripts/fixtures.sh FOLDER, or scripts/fixtures.sh --list" >&2
  exit 2
}

# hub REPO FOLDER FILE HASH: prints the row of a file on huggingface.co.
# A row has the path in FOLDER, the first 16 digits of the SHA-256 or - if any version fits, and the URL.
hub() {
  echo "$2/$3 $4 https://huggingface.co/$1/resolve/main/$3"
}

rows() {
  local name ending
  hub openai/gpt-oss-20b gpt-oss-20b tokenizer.json 0614fe83cadab421
  hub openai-community/gpt2 gpt2 tokenizer.json 8414cab924d8b9b3
  hub Qwen/Qwen2.5-0.5B-Instruct Qwen2.5 tokenizer.json 22bfef58b74d2fa4
  hub Qwen/Qwen2.5-0.5B-Instruct Qwen2.5 tokenizer_config.json 5b5d4f65d0acd3b2
  hub TinyLlama/TinyLlama-1.1B-Chat-v1.0 TinyLlama-1.1B-Chat-v1.0 tokenizer.json bcd04f0eadf90287
  hub TinyLlama/TinyLlama-1.1B-Chat-v1.0 TinyLlama-1.1B-Chat-v1.0 tokenizer_config.json 7b41ba7d0eb91e77
  hub TinyLlama/TinyLlama-1.1B-Chat-v1.0 TinyLlama-1.1B-Chat-v1.0 special_tokens_map.json 82d96d7a9e6ced03
  hub deepseek-ai/DeepSeek-R1-Distill-Llama-8B DeepSeek-R1-Distill-Llama-8B tokenizer.json b9c9eb63a8e03059
  hub deepseek-ai/DeepSeek-R1-Distill-Llama-8B DeepSeek-R1-Distill-Llama-8B tokenizer_config.json 8ac8c85fb242563c
  hub microsoft/Phi-3-mini-4k-instruct phi-3-mini tokenizer.json 9e2ae3d66819f163
  hub microsoft/Phi-3-mini-4k-instruct phi-3-mini tokenizer_config.json e7571cb644e0bbba
  hub meta-llama/Llama-3.1-8B-Instruct Llama-3.1-8B-Instruct tokenizer.json 79e3e522635f3171
  hub meta-llama/Llama-3.1-8B-Instruct Llama-3.1-8B-Instruct tokenizer_config.json 177c7b61e616fecb
  hub meta-llama/Llama-3.1-8B-Instruct Llama-3.1-8B-Instruct special_tokens_map.json 6f38c73729248f6c
  hub mistralai/Mistral-7B-Instruct-v0.3 Mistral-7B-Instruct-v0.3 tokenizer.json e553af6fff7d7ad7
  hub mistralai/Mistral-7B-Instruct-v0.3 Mistral-7B-Instruct-v0.3 tokenizer.model.v3 37f00374dea48658
  # Both files of a pair come from the same commit, so any version fits.
  local llama_cpp=https://raw.githubusercontent.com/ggml-org/llama.cpp/master/models
  echo "vectors/llama.cpp/ggml-vocab-gpt-2.gguf - $llama_cpp/ggml-vocab-gpt-2.gguf"
  for name in gpt-2 gpt-4o llama-bpe llama-spm qwen2; do
    for ending in inp out; do
      echo "vectors/llama.cpp/ggml-vocab-$name.gguf.$ending - $llama_cpp/ggml-vocab-$name.gguf.$ending"
    done
  done
  local harmony=https://raw.githubusercontent.com/openai/harmony/ec7606df9e87e3d0a1fec9f50928c1e407f0c438/test-data
  for name in browser_tool_only dropping_cot_by_default no_tools preserve_cot reasoning_system_message \
    render_functions_with_parameters simple_convo simple_convo_high_effort simple_reasoning_response simple_tool_call \
    streamable_parser tool_response_parsing; do
    echo "vectors/harmony/test_$name.txt - $harmony/test_$name.txt"
  done
}

[ $# = 1 ] && [ -n "$1" ] || usage
if [ "$1" = --list ]; then
  rows | while read -r path _ url; do
    echo "$path  $url"
  done
  exit
fi
[[ $1 != -* ]] || usage
for tool in curl sha256sum; do
  command -v $tool > /dev/null || fail "cannot find $tool; install it"
done

# download URL FILE: sends HF_TOKEN only to huggingface.co. curl does not pass it on to other hosts after a redirect.
download() {
  local token=()
  if [ -n "${HF_TOKEN:-}" ] && [[ $1 = https://huggingface.co/* ]]; then
    token=(-H "Authorization: Bearer $HF_TOKEN")
  fi
  curl --fail --silent --show-error --location --retry 3 "${token[@]}" --output "$2" "$1"
}

folder=$1
missing=() changed=()
while read -r path hash url; do
  file=$folder/$path
  if [ ! -f "$file" ]; then
    echo "$path"
    mkdir -p "$(dirname "$file")"
    if ! download "$url" "$file.part"; then
      missing+=("$path")
      continue
    fi
    mv "$file.part" "$file" # renamed last, so that FOLDER has only complete files
  fi
  [ "$hash" = - ] || [ "$(sha256sum "$file" | cut -c 1-16)" = "$hash" ] || changed+=("$path")
done < <(rows)

[ ${#changed[@]} = 0 ] || echo "fixtures.sh: not the version with which the tests were written: ${changed[*]}" >&2
[ ${#missing[@]} = 0 ] ||
  fail "cannot download ${missing[*]}; if access is denied, accept the license on huggingface.co and set HF_TOKEN"
[ ${#changed[@]} = 0 ] || exit 1
# The skipped tests need files that are not public.
skip="--skip templates_agree_with --skip templates_without_tools --skip real_configs"
echo "complete; run: INFERNO_FIXTURES=$(realpath "$folder") cargo test -- $skip"
