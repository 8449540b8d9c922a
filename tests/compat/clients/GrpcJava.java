// gRPC's client for Java, with stubs of Debian's generators; examples/ChatGrpc.java is the short form.
import com.google.gson.Gson;
import com.google.gson.JsonParser;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.internal.GrpcUtil;
import io.grpc.stub.MetadataUtils;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import tandem.v1.ChatMessage;
import tandem.v1.ChatRequest;
import tandem.v1.ChatResponse;
import tandem.v1.FinishReason;
import tandem.v1.GenerateRequest;
import tandem.v1.InferenceGrpc;
import tandem.v1.ListModelsRequest;
import tandem.v1.ResponseFormat;
import tandem.v1.SamplingParams;
import tandem.v1.Tool;
import tandem.v1.ToolChoice;

public class GrpcJava {
  interface Check {
    void run() throws Exception;
  }

  static final Map<String, String> results = new LinkedHashMap<>();

  static void check(String name, Check check) {
    try {
      check.run();
      results.put(name, "");
    } catch (Exception error) {
      String told = error.toString();
      results.put(name, told.substring(0, Math.min(300, told.length())));
    }
  }

  static void hold(boolean holds, String what) {
    if (!holds) throw new IllegalStateException(what);
  }

  static ChatRequest.Builder asked(int maxTokens) {
    return ChatRequest.newBuilder()
        .addMessages(ChatMessage.newBuilder().setRole("user").setContent("How is the weather?"))
        .setSampling(SamplingParams.newBuilder().setMaxTokens(maxTokens));
  }

  static void fails(Status.Code code, Check check) throws Exception {
    try {
      check.run();
    } catch (StatusRuntimeException error) {
      hold(error.getStatus().getCode() == code, error.toString());
      return;
    }
    throw new IllegalStateException("it was answered");
  }

  public static void main(String[] arguments) throws Exception {
    Metadata metadata = new Metadata();
    metadata.put(
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + System.getenv("COMPAT_KEY"));
    ManagedChannel channel = ManagedChannelBuilder.forTarget(System.getenv("COMPAT_GRPC")).usePlaintext().build();
    InferenceGrpc.InferenceBlockingStub client =
        InferenceGrpc.newBlockingStub(channel).withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));

    check("models", () -> hold(client.listModels(ListModelsRequest.getDefaultInstance()).getModelsList().stream()
        .anyMatch(model -> model.getName().equals(System.getenv("COMPAT_MODEL"))), "the model is not listed"));
    check("a text", () -> hold(client.generateUnary(GenerateRequest.newBuilder().setText("Once")
        .setSampling(SamplingParams.newBuilder().setMaxTokens(8)).build()).getTokenIdsCount() > 0, "no tokens"));
    check("a conversation, streamed", () -> {
      ChatResponse last = null;
      for (Iterator<ChatResponse> parts = client.chat(asked(8).build()); parts.hasNext(); ) last = parts.next();
      hold(last.getFinishReason() != FinishReason.FINISH_REASON_UNSPECIFIED, "the last message does not say why");
    });
    check("a function that must be called", () -> {
      String parameters = "{\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", "
          + "\"enum\": [\"Rome\", \"Oslo\"]}}, \"required\": [\"city\"]}";
      String told = client.chatUnary(asked(200).addTools(Tool.newBuilder().setName("weather").setParameters(parameters))
          .setToolChoice(ToolChoice.newBuilder().setMode(ToolChoice.Mode.MODE_REQUIRED)).build())
          .getChoices(0).getDelta().getToolCalls(0).getArguments();
      hold(JsonParser.parseString(told).getAsJsonObject().has("city"), told);
    });
    check("a regular expression", () -> {
      ResponseFormat form = ResponseFormat.newBuilder().setRegex("[0-9]{3}").build();
      String text = client.chatUnary(asked(8).setResponseFormat(form).build()).getChoices(0).getDelta().getContent();
      hold(text.matches("[0-9]{3}"), text);
    });
    check("mistakes are INVALID_ARGUMENT", () ->
        fails(Status.Code.INVALID_ARGUMENT, () -> client.chatUnary(ChatRequest.getDefaultInstance())));
    check("a deadline ends the call", () -> fails(Status.Code.DEADLINE_EXCEEDED, () ->
        client.withDeadlineAfter(1, TimeUnit.MILLISECONDS).chatUnary(asked(500).build())));
    channel.shutdown();
    System.out.println(new Gson().toJson(
        Map.of("version", GrpcUtil.getGrpcBuildVersion().getImplementationVersion(), "checks", results)));
  }
}
